-- Where the registry stands, and on demand which adapters it has at that very revision.
-- KEYS: epoch, revision, adapters
-- ARGV: '1' to list the adapters too
-- Returns {epoch or '', revision or '0', flat list of field, head, field, head, ...}.
local epoch, revision, adapters = unpack(KEYS)
local heads = {}
if ARGV[1] == '1' then heads = redis.call('HGETALL', adapters) end
return {redis.call('GET', epoch) or '', redis.call('GET', revision) or '0', heads}
