r"""The languages of `format`, as patterns that a text matches whole.

JSON Schema calls a format an annotation. Here it is held: a schema with `"format": "date"` wants a
date. Each language is that of its RFC, but for these, which allow less:

- `time`, `date-time`: leap seconds at offsets of whole and half hours, to a millisecond;
- `hostname`: at most 3 labels of 63 characters or 8 of 30, none in the form `xn--`;
- `email`: at most 3 hyphens in a row in the domain; pydantic's, beside a bound of 21 to some 200
  characters: a top-level domain of 2 or 3 letters;
- `idn-hostname`: labels of scripts that have no rules of context;
- `regex`: no back-reference, no group in a group;
- `application/json` (draft 7's `contentMediaType`): arrays and objects in two levels.

`byte` (OpenAPI) is base64 with the spaces and line breaks that RFC 2045 lets decoders ignore.
"""

from __future__ import annotations

from collections.abc import Sequence

from overlap_spec.grammar.automata.regex import Pattern

PYDANTIC_MAIL = "pydantic-email"
"""The format of an address that pydantic's `EmailStr` takes."""
JSON = "application/json"
"""The `contentMediaType` of texts that are JSON."""
_FEWEST_TURNS = 15
# RFC 3339. The year 0000 is left out: Python and most databases have none.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
HOUR, MINUTE = "([01][0-9]|2[0-3])", "[0-5][0-9]"
_FRACTION, _MILLIS = r"(\.[0-9]+)?", r"(\.[0-9]{1,3})?"
# A leap second is 23:59:60 in UTC: here at offsets of whole and half hours.
_LEAP_SECOND = "|".join(
    rf"{hour:02}:(59:60{_MILLIS}(\+{(hour + 1) % 24:02}:00|-{23 - hour:02}:00)"
    rf"|29:60{_MILLIS}(\+{hour:02}:30|-{23 - hour:02}:30))"
    for hour in range(24)
)
_TIME = (
    rf"({HOUR}:{MINUTE}:{MINUTE}{_FRACTION}([Zz]|[+\-]{HOUR}:{MINUTE})"
    rf"|23:59:60{_FRACTION}[Zz]|{_LEAP_SECOND})"
)
_N = "[0-9]+"
_DURATION = (
    f"P({_N}W|({_N}D|{_N}M({_N}D)?|{_N}Y({_N}M({_N}D)?)?)(T({_N}S|{_N}M({_N}S)?|{_N}H({_N}M({_N}S)?)?))?"
    f"|T({_N}S|{_N}M({_N}S)?|{_N}H({_N}M({_N}S)?)?))"
)

# RFC 3986 and 3987.
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{BYTE}(\.{BYTE}){{3}}"
HEX = "[0-9A-Fa-f]"
_H16 = f"{HEX}{{1,4}}"
_LS32 = f"({_H16}:{_H16}|{_IPV4})"


def _shortened(most: int, after: str) -> str:
    """An address with `::` behind up to `most` groups."""
    return f"(({_H16}:){{0,{most - 1}}}{_H16})?::{after}" if most else f"::{after}"


_LONG = [_shortened(before, f"({_H16}:){{{5 - before}}}{_LS32}") for before in range(6)]
_IPV6 = f"(({_H16}:){{6}}{_LS32}|{'|'.join(_LONG)}|{_shortened(6, _H16)}|{_shortened(7, '')})"
_ENCODED = f"%{HEX}{{2}}"
_SUB = "!$&'()*+,;="
_OTHER = "\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U000dffff"
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U0010fffd"


def _reference(other: str, private: str, absolute: bool) -> str:
    """A URI, or with `absolute` False a reference; `other` and `private` are what an IRI adds."""
    free = rf"A-Za-z0-9\-._~{other}"
    name = f"([{free}{_SUB}]|{_ENCODED})*"
    char = f"([{free}{_SUB}:@]|{_ENCODED})"
    password = f":([{free}{_SUB}:]|{_ENCODED})*"
    future = rf"[vV]{HEX}+\.[A-Za-z0-9\-._~{_SUB}:]+"
    literal, port = rf"\[({_IPV6}|{future})\]", "(:[0-9]*)?"
    # A name may turn out to be a user's: one loop reads either.
    after_name = f"({port}|({password})?@({name}|{literal}){port})"
    authority = f"({name}{after_name}|{literal}{port})"
    after = f"(/([{free}{_SUB}:@/]|{_ENCODED})*)?"
    rooted = f"/({char}([{free}{_SUB}:@/]|{_ENCODED})*)?"
    plain = f"([{free}{_SUB}@]|{_ENCODED})+{after}"
    query = rf"(\?({char}|[/?{private}])*)?" if private else rf"(\?({char}|[/?])*)?"
    rest = rf"{query}(#({char}|[/?])*)?"
    full = rf"[A-Za-z][A-Za-z0-9+.\-]*:(//{authority}{after}|{rooted}|{char}+{after}|){rest}"
    return full if absolute else f"({full}|(//{authority}{after}|{rooted}|{plain}|){rest})"


# RFC 1123 and 5321.
def _label(most: int) -> str:
    """A label of up to `most` characters that does not begin with `xn--`."""
    end, char = "[A-Za-z0-9]", r"[A-Za-z0-9\-]"

    def tail(count: int) -> str:
        return f"({char}{{0,{count - 1}}}{end})?"

    return (
        f"([A-WYZa-wyz0-9]{tail(most - 1)}|[Xx]([A-MO-Za-mo-z0-9]{tail(most - 2)}"
        f"|-{char}{{0,{most - 3}}}{end}|[Nn]({end}{tail(most - 3)}|-{end}{tail(most - 4)})?)?)"
    )


_HOST = rf"({_label(63)}(\.{_label(63)}){{0,2}}|{_label(30)}(\.{_label(30)}){{0,7}})"
_DOMAIN = r"[A-Za-z0-9]+((\-{1,3}|\.)[A-Za-z0-9]+)*"
_ATOM_CHARS = r"A-Za-z0-9!#$%&'*+/=?\^_`{|}~\-"
_LITERAL = rf"\[({_IPV4}|IPv6:{_IPV6})\]"


def _mailbox(other: str, domain: str) -> str:
    atom = f"[{_ATOM_CHARS}{other}]"
    quoted = rf'"([ !#-\[\]-~{other}]|\\[ -~])*"'
    return rf"({atom}+(\.{atom}+)*|{quoted})@({domain}|{_LITERAL})"


_WIDE = "\u0080-\ud7ff\ue000-\U0010ffff"
# Lower-case Latin, Greek and Cyrillic, Hiragana, Katakana, Han, Hangul. Such a label is at most 63
# bytes long in its ASCII form.
_SCRIPTS = (
    "a-z0-9\u00df-\u00f6\u00f8-\u00ff\u03ac-\u03ce\u0430-\u045f"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_IDN_LABEL = f"([{_SCRIPTS}]{{1,10}}|{_label(30)})"
_DOTS = "[.\u3002\uff0e\uff61]"

# What pydantic's validator takes of RFC 5321: no quotes, no addresses of hosts, a domain of several
# labels that ends in letters. At most 254 characters; labels of up to 41, without two hyphens in a
# row.
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SPECIAL = ("arpa", "invalid", "local", "localhost", "onion", "test")


def _either(letters: str) -> str:
    return f"[{letters}{letters.upper()}]"


def _other_than(words: Sequence[str], most: int) -> str:
    """Up to `most` letters, in either case, that are none of the words."""
    heads = "".join(dict.fromkeys(word[0] for word in words if word))
    ways = [_either("".join(c for c in _LETTERS if c not in heads)) + f"[A-Za-z]{{0,{most - 1}}}"]
    ways += [
        _either(head) + _other_than([word[1:] for word in words if word[:1] == head], most - 1)
        for head in heads
    ]
    return f"({'|'.join(ways)}){'' if '' in words else '?'}"


_TOP = _other_than(("", *_SPECIAL), 18)
_PYDANTIC_MAIL = (
    rf"([{_ATOM_CHARS}](\.?[{_ATOM_CHARS}]){{0,31}}|[{_ATOM_CHARS}]{{33,64}})"
    rf"@([A-Za-z0-9](\-?[A-Za-z0-9]){{0,20}}\.){{1,4}}{_TOP}"
)

# RFC 6570.
_VAR_CHAR = f"([A-Za-z0-9_]|{_ENCODED})"
_VAR = rf"{_VAR_CHAR}(\.?{_VAR_CHAR})*(:[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"([!#$&-;=?-\[\]_a-z~'{_OTHER}{_PRIVATE}]|{_ENCODED}|\{{[+#./;?&]?{_VAR}(,{_VAR})*\}})*"
)

# RFC 6901.
_POINTER = "(/([^/~]|~[01])*)*"


def _regex(depth: int) -> str:
    plain = "[A-Za-z0-9 _,:;=@!\"#%&'/<>~`\\-]"
    escape = r"\\([dDwWsStnrfv.\\/()\[\]{}|*+?\^$]|c[A-Za-z])"
    members = r"([A-Za-z0-9 _,:;=@!#%&'/<>~`.()*+?$|{}]|a-z|A-Z|0-9|\\[dDwWsStnrfv.\\/\[\]\^\-])+"
    atom = rf"{plain}|{escape}|\.|\[\^?({members})?\]"
    place = r"\^|\$|\\[bB]"
    if depth:
        inner = _regex(depth - 1)
        atom += rf"|\((\?:|\?<[A-Za-z]+>)?{inner}\)"
        place += rf"|\(\?<?[=!]{inner}\)"
    part = rf"(({atom})([*+?]|\{{[0-9]{{1,3}},?\}})?\??|{place})+"
    return rf"{part}(\|{part})*"


def _uuid(version: str, variant: str) -> str:
    return f"{HEX}{{8}}-{HEX}{{4}}-{version}{HEX}{{3}}-{variant}{HEX}{{3}}-{HEX}{{12}}"


def _base64(char: str) -> str:
    return f"({char}{{4}})*({char}{{2}}==|{char}{{3}}=)?"


def _document(depth: int) -> str:
    """A JSON text whose arrays and objects are nested so deep."""
    space, most = r"[ \t\n\r]*", depth - 1
    text = r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9A-Fa-f]{4}))*"'
    value = rf"{text}|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+\-]?[0-9]+)?|true|false|null"
    if depth:
        item = _document(most)
        member = f"{space}{text}{space}:{item}"
        value += rf"|\[({space}|{item}(,{item})*)\]|\{{({space}|{member}(,{member})*)\}}"
    return f"{space}({value}){space}"


def _networks() -> str:
    """IPv4 networks: an address and a prefix behind which all bits are 0."""
    found = [rf"{_IPV4}(/32)?", r"0\.0\.0\.0/0"]
    for prefix in range(1, 32):
        whole, bits = divmod(prefix, 8)
        step = 1 << (8 - bits)
        octets = [BYTE] * whole
        if bits:
            octets.append(f"({'|'.join(str(value) for value in range(0, 256, step))})")
        octets += ["0"] * (4 - len(octets))
        address = r"\.".join(octets)
        found.append(f"{address}/{prefix}")
    return f"({'|'.join(found)})"


_INTERFACE4 = rf"{_IPV4}(/(3[0-2]|[12]?[0-9]))?"
_INTERFACE6 = rf"{_IPV6}(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?"
_NETWORK4 = _networks()
# Prefixes of whole groups.
_NETWORK6 = (
    f"({_IPV6}(/128)?|::/0|"
    + "|".join(f"({_H16}:){{{groups}}}:/{16 * groups}" for groups in range(1, 8))
    + ")"
)

_WHOLE = {
    "date": DATE,
    "date-time": f"{DATE}[Tt]{_TIME}",
    "time": _TIME,
    "duration": _DURATION,
    "email": _mailbox("", _DOMAIN),
    "idn-email": _mailbox(_WIDE, rf"[A-Za-z0-9{_WIDE}]+((\-{{1,3}}|\.)[A-Za-z0-9{_WIDE}]+)*"),
    PYDANTIC_MAIL: _PYDANTIC_MAIL,
    "hostname": _HOST,
    "idn-hostname": f"{_IDN_LABEL}({_DOTS}{_IDN_LABEL}){{0,7}}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "ipv4interface": _INTERFACE4,
    "ipv6interface": _INTERFACE6,
    "ipv4network": _NETWORK4,
    "ipv6network": _NETWORK6,
    "ipvanyaddress": f"({_IPV4}|{_IPV6})",
    "ipvanyinterface": f"({_INTERFACE4}|{_INTERFACE6})",
    "ipvanynetwork": f"({_NETWORK4}|{_NETWORK6})",
    "uri": _reference("", "", True),
    "uri-reference": _reference("", "", False),
    "iri": _reference(_OTHER, _PRIVATE, True),
    "iri-reference": _reference(_OTHER, _PRIVATE, False),
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "regex": _regex(1),
    "uuid": _uuid(HEX, HEX),
    **{f"uuid{version}": _uuid(str(version), "[89ABab]") for version in range(1, 9)},
    "base64": _base64("[A-Za-z0-9+/]"),
    "byte": _base64(r"([A-Za-z0-9+/][ \r\n]*)"),
    "base64url": _base64(r"[A-Za-z0-9_\-]"),
    JSON: _document(2),
}
INTEGERS = {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
"""Least and most of the formats of whole numbers (OpenAPI's registry)."""
_HINTS = frozenset(("binary", "directory-path", "double", "file-path", "float", "password", "path"))


# A part of some languages, whose longest text grows slowly with the turns of its repeats.
_PLAIN_HOST = r"[A-Za-z0-9]([.\-]?[A-Za-z0-9])*"
_PLAIN_MAILBOX = rf"[{_ATOM_CHARS}](\.?[{_ATOM_CHARS}])*@{_PLAIN_HOST}"
_PLAIN_URI = (
    rf"[A-Za-z][A-Za-z0-9+.\-]*:(//{_PLAIN_HOST})?(/([A-Za-z0-9\-._~{_SUB}:@/?]|{_ENCODED})*)?"
)
# The names that no mail can go to have four letters and more.
_SHORT_MAIL = (
    rf"[{_ATOM_CHARS}](\.?[{_ATOM_CHARS}]){{0,31}}"
    rf"@([A-Za-z0-9](\-?[A-Za-z0-9])*\.)+[A-Za-z]{{2,3}}"
)
_PART = {
    PYDANTIC_MAIL: _SHORT_MAIL,
    **dict.fromkeys(("email", "idn-email"), _PLAIN_MAILBOX),
    **dict.fromkeys(("hostname", "idn-hostname"), _PLAIN_HOST),
    **dict.fromkeys(("uri", "uri-reference", "iri", "iri-reference"), _PLAIN_URI),
}


def _pattern(language: str) -> str:
    return rf"^({language})\Z"


_PATTERNS = {name: _pattern(language) for name, language in _WHOLE.items()}
_PARTS = {_PATTERNS[name]: _pattern(language) for name, language in _PART.items()}
_KNOWN = frozenset((*_PATTERNS.values(), *_PARTS.values()))


def pattern(name: str) -> str | None:
    """The pattern of a format of strings; None if it has none, and says nothing."""
    return _PATTERNS.get(name)


def is_known(name: str) -> bool:
    """Whether a format is held, or is a hint that no value can violate."""
    return name in _PATTERNS or name in INTEGERS or name in _HINTS


def part(source: str) -> str | None:
    """A pattern of some texts of a format, given by its pattern, that has few states."""
    return _PARTS.get(source)


def within(source: str, most: int) -> Pattern | None:
    """Texts of at most `most` characters of a format, given by its pattern, by bounds on the turns
    of its repeats; None if it is no format, or the bounds would leave too little of it."""
    for turns in range(most if source in _KNOWN else 0, _FEWEST_TURNS, -1):
        found = Pattern(source, "format", most=turns)
        longest = found.longest()
        if longest is not None and longest <= most:
            return found
    return None
