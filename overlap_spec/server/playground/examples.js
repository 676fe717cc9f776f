// Kinds of constraint, and an example of each.
import { parseLines, pretty } from "./dom.js";

// The editor's label (null: no editor), and the fields of the request's body.
export const KINDS = {
  json_schema: ["JSON under a schema", "JSON schema", (s) => ({
    response_format: { type: "json_schema", json_schema: { name: "playground", schema: JSON.parse(s) } } })],
  json_object: ["any JSON object", null, () => ({ response_format: { type: "json_object" } })],
  choice: ["one of these", "Choices, one a line", (s) => ({ structured_outputs: { choice: parseLines(s) } })],
  regex: ["a regular expression", "Pattern", (s) => ({ regex: s.trim() })],
  ebnf: ["a grammar (EBNF)", "Rules; the start is root", (s) => ({ ebnf: s })],
  tools: ["tool calls", "Tools, as OpenAI defines them", (s) => ({ tools: JSON.parse(s) })],
  text: ["anything: free text", null, () => ({})],
};

const object = (properties) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false });

export const EXAMPLES = {
  "A person: JSON schema": ["json_schema", "Maria Lopez is 34 years old and lives in Lisbon.",
    pretty(object({ name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 130 },
      city: { type: "string", maxLength: 40 } }))],
  "A status: choice": ["choice", "What is the status? The order AB-1234 placed by David Clark is now shipped.",
    "pending\nshipped\ndelivered\ncancelled"],
  "Any object: JSON": ["json_object", "Extract name, age and city: Anna is 30 and lives in Rome.", ""],
  "A date: regex": ["regex", "The Robotics Fair takes place on 2025-03-14 at 18:30 in Oslo. Give only the date.",
    "20\\d\\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\\d|3[01])"],
  "Yes or no: grammar": ["ebnf", "The flight is delayed. Is the flight delayed?", 'root ::= "yes" | "no"'],
  "The weather: tools": ["tools", "What is the weather in Vienna in celsius?", pretty([{ type: "function", function: {
    name: "get_weather", description: "Get the weather of a city", parameters: object({
      city: { type: "string", maxLength: 40 }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } }) } }])],
  "A greeting: free text": ["text", "Good morning", ""],
};
