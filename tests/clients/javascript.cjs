// Asks a server by the JavaScript clients; prints what came as JSON.
// node javascript.cjs URL openai|anthropic

const [, , url, which] = process.argv
const asked = [{ role: 'user', content: 'Maria Lopez is 34 years old and lives in Lisbon.' }]
const schema = {
  type: 'object',
  properties: { zyx: { type: 'integer' }, wvu: { type: 'boolean' } },
  required: ['zyx', 'wvu'],
  additionalProperties: false,
}
const common = { model: 'overlap-spec', max_tokens: 100 }

async function askOpenAI () {
  const { OpenAI } = require('openai')
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 })
  const chat = await client.chat.completions.create({ ...common, messages: asked })
  let streamed = ''
  const stream = await client.chat.completions.create({ ...common, messages: asked, stream: true })
  for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? ''
  const input = { model: common.model, max_output_tokens: 100, input: asked[0].content }
  const response = await client.responses.create(input)
  const events = []
  for await (const event of client.responses.stream(input)) events.push(event.type)
  const format = { type: 'json_schema', name: 'pair', schema, strict: true }
  const formatted = await client.responses.create({ ...input, text: { format } })
  const tool = { type: 'function', function: { name: 'zyx_tool', parameters: schema } }
  const called = await client.chat.completions.create({
    ...common, messages: asked, tools: [tool], tool_choice: 'required', parallel_tool_calls: false,
  })
  return {
    texts: [chat.choices[0].message.content, streamed, response.output_text],
    events,
    objects: [
      JSON.parse(formatted.output_text),
      JSON.parse(called.choices[0].message.tool_calls[0].function.arguments),
    ],
  }
}

async function askAnthropic () {
  const { Anthropic } = require('@anthropic-ai/sdk')
  const client = new Anthropic({ baseURL: url, apiKey: 'none', maxRetries: 0 })
  const whole = await client.messages.create({ ...common, messages: asked })
  const stream = client.messages.stream({ ...common, messages: asked })
  const events = []
  for await (const event of stream) events.push(event.type)
  const final = await stream.finalMessage()
  const used = await client.messages.create({
    ...common,
    messages: asked,
    tools: [{ name: 'zyx_tool', input_schema: schema }],
    tool_choice: { type: 'any', disable_parallel_tool_use: true },
  })
  return {
    texts: [whole.content[0].text, final.content[0].text],
    events,
    objects: [used.content[0].input],
  }
}

const ask = which === 'openai' ? askOpenAI : askAnthropic
ask().then(
  (came) => console.log(JSON.stringify(came)),
  (error) => {
    console.error(error)
    process.exit(1)
  },
)
