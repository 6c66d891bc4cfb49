package consumer_test

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// headers makes headers of pairs "name=value".
func headers(pairs ...string) []kgo.RecordHeader {
	made := make([]kgo.RecordHeader, len(pairs))
	for i, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		made[i] = kgo.RecordHeader{Key: name, Value: []byte(value)}
	}
	return made
}

// produceWith sends one record for each value, all with the same headers.
func (h *harness) produceWith(with []kgo.RecordHeader, values ...string) {
	h.t.Helper()
	for _, value := range values {
		h.produceRecord(&kgo.Record{Value: []byte(value), Headers: with})
	}
}

// registeredEarlier is what the previous release leaves of a consumer.
func (h *harness) registeredEarlier() {
	h.t.Helper()
	_, err := h.pool.Exec(h.t.Context(), `INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES ($1, $2, ARRAY[$2], '7 days')`, h.topic+"/"+h.topic, h.topic)
	require.NoError(h.t, err)
}

func (h *harness) logged(text string) int { return strings.Count(h.log.String(), text) }

// Property: a header that names something else than the message (a customer, a request) makes no
// message the duplicate of another: each has its effect.
func TestHeadersThatNameNoMessageDoNotCount(t *testing.T) {
	t.Parallel()
	for _, header := range []string{"id=customer-4711", "idempotency-key=request-1", "_watermill_message_uuid=1", "__debezium.context.taskId=0"} {
		t.Run(header, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceWith(headers(header), "payment 1", "payment 2", "payment 3")
			stop := h.run(consumer.Each(effect), nil)
			h.waitEffects(3)
			require.NoError(t, stop())
			require.Empty(t, h.parked())
		})
	}
}

// Property: a message whose ce_source has the form of the engine's own scopes cannot claim the ID
// of a later message that is known by its coordinates: it is parked, and the other has its effect.
func TestReservedSourceIsRefused(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	// A first message shows the topic's own ID, which the forger has to know.
	h.produceRecord(&kgo.Record{Value: []byte("0")})
	var coordinates atomic.Value
	stop := h.run(consumer.Each(effect), nil)
	h.waitEffects(1)
	require.NoError(t, stop())
	var topicID [16]byte
	require.NoError(t, h.pool.QueryRow(t.Context(), `SELECT topic_id FROM effectonce.consumer_positions WHERE topic = $1`, h.topic).Scan(&topicID))
	raw := append(topicID[:], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6) // partition 0, offset 6
	coordinates.Store(raw)
	for _, forged := range [][]kgo.RecordHeader{
		{{Key: "ce_source", Value: []byte("effectonce:coordinates:" + h.topic)}, {Key: "ce_id", Value: raw}},
		{{Key: "ce_source", Value: []byte("effectonce:coordinates:" + h.topic)}, {Key: "ce_source", Value: []byte("shop")}, {Key: "ce_id", Value: raw}},
		{{Key: "ce_source", Value: []byte("effectonce:")}, {Key: "ce_id", Value: raw}},
		{{Key: "ce_source", Value: []byte("effectonce:later")}, {Key: "ce_id", Value: raw}},
		{{Key: "ce_source", Value: []byte("effectonce:coordinates:" + h.topic)}, {Key: "message-id", Value: raw}},
	} {
		h.produceRecord(&kgo.Record{Value: []byte("forged"), Headers: forged})
	}
	h.produceRecord(&kgo.Record{Value: []byte("honest")})
	stop = h.run(consumer.Each(effect), nil)
	h.wait("position", func() bool { return h.position() == 7 })
	require.NoError(t, stop())
	require.Equal(t, []string{"0", "honest"}, h.values())
	require.Equal(t, slices.Repeat([]string{"forged invalid parked"}, 5), h.parked())
}

// Property: the first duplicate of a consumer is logged, once, with its place and with when the
// first one was processed, whatever table holds its claims.
func TestFirstDuplicateIsLogged(t *testing.T) {
	t.Parallel()
	bothModes(t, "forever", func(t *testing.T, forever bool) {
		t.Helper()
		h := newHarness(t, 1)
		id := dedup.ChildID(dedup.MessageID("x", []byte("x")), "step", time.Now()).String()
		h.produceAs(id, "first")
		h.produceAs(id, "again")
		h.produceAs(id, "and again")
		stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.Forever, c.BatchMax = forever, 2 })
		h.wait("position", func() bool { return h.position() == 3 })
		h.wait("logged", func() bool { return h.logged("duplicate") > 0 })
		require.NoError(t, stop())
		require.Equal(t, []string{"first"}, h.values())
		require.Equal(t, 1, h.logged("first duplicate"), h.log)
		require.Regexp(t, `level=INFO msg="first duplicate.*partition=0 offset=1 id=`+id+` processed_at=20`, h.log.String())
	})
}

// Property: a message that is too large and wrong in another way, too, is parked without its
// payload.
func TestTooLargeIsNeverStoredForAnotherReason(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceWith(headers("message-id=1", "message-id=2"), strings.Repeat("x", 5000))
	h.produceWith(headers("message-id=1", "ce_source=effectonce:"), strings.Repeat("x", 5000))
	h.produceWith(nil, strings.Repeat("x", 5000))
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.MessageBytesMax = 4096
		c.IDFunc = func(*consumer.Message) []byte { panic("boom") }
	})
	h.waitParked("too_large", "too_large", "too_large")
	require.NoError(t, stop())
	require.Zero(t, h.number(`SELECT count(*) FROM effectonce.parked_messages WHERE payload IS NOT NULL`))
}

// Property: if a user's function that identifies messages does not return (panic, Goexit, forever),
// only its message is affected: it is parked and the others have their effects.
func TestFunctionsThatIdentifyCostOnlyTheirMessage(t *testing.T) {
	t.Parallel()
	left := make(chan struct{})
	t.Cleanup(func() { close(left) })
	for name, misbehave := range map[string]func(){
		"panic": func() { panic("boom") }, "goexit": runtime.Goexit, "hangs": func() { <-left },
	} {
		for what, set := range map[string]func(*consumer.Config, func(*consumer.Message)){
			"IDFunc": func(c *consumer.Config, f func(*consumer.Message)) {
				c.IDFunc = func(msg *consumer.Message) []byte { f(msg); return msg.Value }
			},
			"WithoutID": func(c *consumer.Config, f func(*consumer.Message)) { c.Hooks.WithoutID = f },
		} {
			t.Run(what+" "+name, func(t *testing.T) {
				t.Parallel()
				if name == "hangs" {
					longtest.Only(t, "a limit that the other messages have, too")
				}
				h := newHarness(t, 1)
				h.produceWith(nil, "a", "bad", "b", "bad", "c")
				stop := h.run(consumer.Each(effect), func(c *consumer.Config) {
					c.HandlerTimeout = 500 * time.Millisecond
					set(c, func(msg *consumer.Message) {
						if string(msg.Value) == "bad" {
							misbehave()
						}
					})
				})
				h.wait("position", func() bool { return h.position() == 5 })
				require.NoError(t, stop())
				require.Equal(t, []string{"a", "b", "c"}, h.values())
				require.Equal(t, []string{"bad invalid parked", "bad invalid parked"}, h.parked())
			})
		}
	}
}

// Property: the headers of known producers name messages where a second header proves the producer,
// or a profile vouches for it; only the profile keeps payloads from being compared.
func TestKnownProducersNameTheirMessages(t *testing.T) {
	t.Parallel()
	debezium, watermill := headers("id=1", "__debezium.context.connectorName=postgresql"), headers("_watermill_message_uuid=1", "_watermill_requeuer_retries=2")
	for name, tc := range map[string]struct {
		with     []kgo.RecordHeader
		profiles []consumer.IDProfile
		effects  []string
		parked   []string
	}{
		"debezium proven":           {debezium, nil, []string{"a"}, []string{"b conflict parked"}},
		"watermill proven":          {watermill, nil, []string{"a"}, []string{"b conflict parked"}},
		"debezium vouched for":      {headers("id=1"), []consumer.IDProfile{consumer.ProfileDebezium}, []string{"a"}, nil},
		"watermill vouched for":     {headers("_watermill_message_uuid=1"), []consumer.IDProfile{consumer.ProfileWatermill}, []string{"a"}, nil},
		"the other is vouched for":  {headers("id=1"), []consumer.IDProfile{consumer.ProfileWatermill}, []string{"a", "a", "b"}, nil},
		"proof of the other":        {headers("id=1", "_watermill_delayed_for=1s"), nil, []string{"a", "a", "b"}, nil},
		"a proof is no name":        {headers("__debezium.context.taskId=0", "_watermill_delayed_for=1s"), nil, []string{"a", "a", "b"}, nil},
		"both":                      {append(debezium[:2:2], watermill...), []consumer.IDProfile{consumer.ProfileWatermill, consumer.ProfileDebezium}, []string{"a"}, nil},
		"message-id comes first":    {append(headers("message-id=1"), debezium...), nil, []string{"a"}, nil},
		"ce_id is for IDs":          {headers("ce_id=1", "ce_source=shop", "id=2"), nil, []string{"a"}, nil},
		"two values without proof":  {headers("id=1", "id=2"), nil, []string{"a", "a", "b"}, nil},
		"two values, and the proof": {append(headers("id=2"), debezium...), nil, nil, []string{"a invalid parked", "a invalid parked", "b invalid parked"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			h.produceWith(tc.with, "a", "a", "b")
			stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.IDProfiles = tc.profiles })
			h.wait("position", func() bool { return h.position() == 3 })
			require.NoError(t, stop())
			require.Len(t, h.values(), len(tc.effects), h.values())
			for i, value := range h.values() {
				require.Equal(t, tc.effects[i], value)
			}
			require.ElementsMatch(t, tc.parked, h.parked())
		})
	}
}

// Property: the stored rule decides, whatever Config says later: a redelivered message is a
// duplicate. The log explains once how to switch. A name that the previous release registered
// continues with the headers of its Config.
func TestStoredRuleDecides(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		earlier       bool
		first, second []string // IDHeaders
		stored, says  string
	}{
		"new name":     {false, nil, []string{"x-id"}, "standard", "--set 'headers:x-id'"},
		"new headers":  {false, []string{"x-id"}, nil, "headers:x-id", "--set standard"},
		"earlier name": {true, []string{"x-id"}, []string{"message-id"}, "headers:x-id", "--set 'headers:message-id'"},
		"earlier name with the default": {
			true, nil,
			[]string{"x-id"},
			"headers:message-id,ce_id,id,_watermill_message_uuid,idempotency-key", "--set 'headers:x-id'",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHarness(t, 1)
			if tc.earlier {
				h.registeredEarlier()
			}
			h.produceWith(headers("x-id=1", "message-id=2"), "a", "a")
			stop := h.run(consumer.Each(effect), func(c *consumer.Config) { c.IDHeaders, c.BatchMax = tc.first, 1 })
			h.wait("position", func() bool { return h.position() == 2 })
			require.NoError(t, stop())
			ids := h.number(`SELECT count(DISTINCT message_id) FROM effects`)
			h.produceWith(headers("x-id=1", "message-id=2"), "a")
			stop = h.run(consumer.Each(effect), func(c *consumer.Config) { c.IDHeaders = tc.second })
			h.wait("position", func() bool { return h.position() == 3 })
			require.NoError(t, stop())
			require.Equal(t, []string{"a"}, h.values())
			require.Equal(t, 1, ids)
			require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumers WHERE id_rule = $1`, tc.stored))
			require.Equal(t, 1, h.logged(tc.says), h.log)
		})
	}
}

// Property: a function that is slow once, as in a process that froze, does not get its message
// parked.
func TestFunctionThatWasSlowOnceIsAskedAgain(t *testing.T) {
	t.Parallel()
	left := make(chan struct{})
	t.Cleanup(func() { close(left) })
	h := newHarness(t, 1)
	h.produceWith(nil, "a", "slow", "b")
	var calls atomic.Int64
	stop := h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.HandlerTimeout = 500 * time.Millisecond
		c.IDFunc = func(msg *consumer.Message) []byte {
			if string(msg.Value) == "slow" && calls.Add(1) == 1 {
				<-left
			}
			return msg.Value
		}
	})
	h.waitEffects(3)
	require.NoError(t, stop())
	require.Equal(t, []string{"a", "slow", "b"}, h.values())
	require.Empty(t, h.parked())
}

// Property: a fingerprint is stored where the payload is compared, and only there, message by
// message; one that is retried after its claim was forgotten has it again.
func TestFingerprintsAreStoredWhereTheyAreCompared(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	h.produceWith(headers("x-id=1"), "compared", "compared")
	h.produceWith(headers("message-id=2"), "not compared", "dropped")
	h.produceWith(nil, "no header")
	h.produceWith(headers("x-id=3"), "bad")
	var good atomic.Bool
	handler := consumer.Each(func(ctx context.Context, tx pgx.Tx, msg *consumer.Message) error {
		if string(msg.Value) == "bad" && !good.Load() {
			return consumer.Permanent(errBad)
		}
		return effect(ctx, tx, msg)
	})
	change := func(c *consumer.Config) { c.IDHeaders = []string{"message-id", "x-id"} }
	stop := h.run(handler, change)
	h.wait("position", func() bool { return h.position() == 6 })
	require.NoError(t, stop())
	require.Equal(t, []string{"compared", "not compared", "no header"}, h.values())
	printed := `SELECT count(*) FROM effectonce.processed_messages WHERE fingerprint IS NOT NULL AND message_id = ANY (ARRAY[effectonce.message_id($1, '1'), effectonce.message_id($1, '3')])`
	require.Equal(t, 2, h.number(printed, h.topic))
	require.Equal(t, 2, h.number(`SELECT count(*) FROM effectonce.processed_messages WHERE fingerprint IS NOT NULL`))
	require.Equal(t, 4, h.number(`SELECT count(*) FROM effectonce.processed_messages`))

	_, err := h.pool.Exec(t.Context(), `DELETE FROM effectonce.processed_messages WHERE message_id = effectonce.message_id($1, '3')`, h.topic)
	require.NoError(t, err)
	good.Store(true)
	h.retry()
	stop = h.run(handler, change)
	h.waitEffects(4)
	require.NoError(t, stop())
	require.Equal(t, 2, h.number(printed, h.topic))
}

// Property: an invalid rule is refused at once, and so is the rule of a later release.
func TestRulesForIDsHaveBounds(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for says, change := range map[string]func(*consumer.Config){
		`IDHeaders: invalid ID rule: header "a,b"`: func(c *consumer.Config) { c.IDHeaders = []string{"a,b"} },
		`IDHeaders: invalid ID rule: 21 headers`:   func(c *consumer.Config) { c.IDHeaders = slices.Repeat([]string{"a"}, 21) },
		`IDProfiles: invalid ID rule: profile "x"`: func(c *consumer.Config) { c.IDProfiles = []consumer.IDProfile{"x"} },
		`IDProfiles: want none together`: func(c *consumer.Config) {
			c.IDHeaders, c.IDProfiles = []string{}, []consumer.IDProfile{consumer.ProfileDebezium}
		},
	} {
		cfg := consumer.Config{Group: "g", Topics: []string{"t"}}
		change(&cfg)
		_, err := consumer.New(pool, nil, consumer.Each(effect), cfg)
		require.ErrorContains(t, err, says)
	}
	_, err := pool.Exec(t.Context(), `INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window, id_rule) VALUES ('g/t', 'g', '{t}', '7 days', 'of 2030')`)
	require.NoError(t, err)
	c, err := consumer.New(pool, nil, consumer.Each(effect), consumer.Config{Group: "g", Topics: []string{"t"}})
	require.NoError(t, err)
	require.ErrorIs(t, c.Run(t.Context()), dedup.ErrIDRule)
}
