package consumer_test

import (
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/dedup"
	"github.com/effectonce/effectonce/internal/longtest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

func (h *harness) logged(text string) int { return strings.Count(h.log.String(), text) }

// Property: a header that names something else than the message (a customer, a request) makes no
// message the duplicate of another: each has its effect.
func TestHeadersThatNameNoMessageDoNotCount(t *testing.T) {
	t.Parallel()
	names := []string{"id=customer-4711", "idempotency-key=request-1", "_watermill_message_uuid=1", "__debezium.context.taskId=0"}
	eachOf(t, names, func(t *testing.T, h *harness, header string) {
		t.Helper()
		h.produceWith(headers(header), "payment 1", "payment 2", "payment 3")
		h.untilEffects(3, h.run(consumer.Each(effect), nil))
		require.Empty(t, h.parked())
	})
}

// Property: a message whose ce_source has the form of the engine's own scopes cannot claim the ID
// of a later message that is known by its coordinates: it is parked, and the other has its effect.
func TestReservedSourceIsRefused(t *testing.T) {
	t.Parallel()
	h := newHarness(t, 1)
	// A first message shows the topic's own ID, which the forger has to know.
	h.produceRecords(&kgo.Record{Value: []byte("0")})
	h.untilEffects(1, h.run(consumer.Each(effect), nil))
	topicID := pgtest.Value[[16]byte](t, h.pool, `SELECT topic_id FROM effectonce.consumer_positions WHERE topic = $1`, h.topic)
	raw := string(append(topicID[:], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6)) // partition 0, offset 6
	for _, forged := range [][]kgo.RecordHeader{
		headers("ce_source=effectonce:coordinates:"+h.topic, "ce_id="+raw),
		headers("ce_source=effectonce:coordinates:"+h.topic, "ce_source=shop", "ce_id="+raw),
		headers("ce_source=effectonce:", "ce_id="+raw),
		headers("ce_source=effectonce:later", "ce_id="+raw),
		headers("ce_source=effectonce:coordinates:"+h.topic, "message-id="+raw),
	} {
		h.produceRecords(&kgo.Record{Value: []byte("forged"), Headers: forged})
	}
	h.produceRecords(&kgo.Record{Value: []byte("honest")})
	h.untilHandled(7, h.run(consumer.Each(effect), nil))
	require.Equal(t, []string{"0", "honest"}, h.values())
	require.Equal(t, slices.Repeat([]string{"forged invalid parked"}, 5), h.parked())
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
	each(t, map[string]func(){
		"panic": func() { panic("boom") }, "goexit": runtime.Goexit, "hangs": func() { <-left },
	}, func(t *testing.T, h *harness, name string, misbehave func()) {
		t.Helper()
		if name == "hangs" {
			longtest.Only(t, "a limit that the other messages have, too")
		}
		h.produceWith(nil, "a", "bad", "b", "bad", "c")
		h.untilHandled(5, h.run(consumer.Each(effect), func(c *consumer.Config) {
			c.HandlerTimeout = 500 * time.Millisecond
			c.IDFunc = func(msg *consumer.Message) []byte {
				if string(msg.Value) == "bad" {
					misbehave()
				}
				return msg.Value
			}
		}))
		require.Equal(t, []string{"a", "b", "c"}, h.values())
		require.Equal(t, []string{"bad invalid parked", "bad invalid parked"}, h.parked())
	})
}

// Property: the headers of known producers name messages where a second header proves the producer,
// or a profile vouches for it.
func TestKnownProducersNameTheirMessages(t *testing.T) {
	t.Parallel()
	debezium, watermill := headers("id=1", "__debezium.context.connectorName=postgresql"), headers("_watermill_message_uuid=1", "_watermill_requeuer_retries=2")
	type testCase struct {
		with     []kgo.RecordHeader
		profiles []consumer.IDProfile
		effects  []string
		parked   []string
	}
	each(t, map[string]testCase{
		"debezium proven":           {debezium, nil, []string{"a"}, []string{"b conflict parked"}},
		"watermill proven":          {watermill, nil, []string{"a"}, []string{"b conflict parked"}},
		"debezium vouched for":      {headers("id=1"), []consumer.IDProfile{consumer.ProfileDebezium}, []string{"a"}, []string{"b conflict parked"}},
		"watermill vouched for":     {headers("_watermill_message_uuid=1"), []consumer.IDProfile{consumer.ProfileWatermill}, []string{"a"}, []string{"b conflict parked"}},
		"the other is vouched for":  {headers("id=1"), []consumer.IDProfile{consumer.ProfileWatermill}, []string{"a", "a", "b"}, nil},
		"proof of the other":        {headers("id=1", "_watermill_delayed_for=1s"), nil, []string{"a", "a", "b"}, nil},
		"both":                      {append(debezium[:2:2], watermill...), []consumer.IDProfile{consumer.ProfileWatermill, consumer.ProfileDebezium}, []string{"a"}, []string{"b conflict parked"}},
		"message-id comes first":    {append(headers("message-id=1"), debezium...), nil, []string{"a"}, []string{"b conflict parked"}},
		"ce_id is for IDs":          {headers("ce_id=1", "ce_source=shop", "id=2"), nil, []string{"a"}, []string{"b conflict parked"}},
		"two values without proof":  {headers("id=1", "id=2"), nil, []string{"a", "a", "b"}, nil},
		"two values, and the proof": {append(headers("id=2"), debezium...), nil, []string{}, []string{"a invalid parked", "a invalid parked", "b invalid parked"}},
	}, func(t *testing.T, h *harness, _ string, tc testCase) {
		t.Helper()
		h.produceWith(tc.with, "a", "a", "b")
		h.untilHandled(3, h.run(consumer.Each(effect), func(c *consumer.Config) { c.IDProfiles = tc.profiles }))
		require.Equal(t, tc.effects, h.values())
		require.ElementsMatch(t, tc.parked, h.parked())
	})
}

// Property: the stored rule decides, whatever Config says later: a redelivered message is a
// duplicate. The log explains once how to switch.
func TestStoredRuleDecides(t *testing.T) {
	t.Parallel()
	type testCase struct {
		first, second []string // IDHeaders
		stored, says  string
	}
	each(t, map[string]testCase{
		"new name":    {nil, []string{"x-id"}, "standard", "--set 'headers:x-id'"},
		"new headers": {[]string{"x-id"}, nil, "headers:x-id", "--set 'standard'"},
	}, func(t *testing.T, h *harness, _ string, tc testCase) {
		t.Helper()
		h.produceWith(headers("x-id=1", "message-id=2"), "a", "a")
		h.untilHandled(2, h.run(consumer.Each(effect), func(c *consumer.Config) { c.IDHeaders, c.BatchMax = tc.first, 1 }))
		ids := h.number(`SELECT count(DISTINCT message_id) FROM effects`)
		h.produceWith(headers("x-id=1", "message-id=2"), "a")
		h.untilHandled(3, h.run(consumer.Each(effect), func(c *consumer.Config) { c.IDHeaders = tc.second }))
		require.Equal(t, []string{"a"}, h.values())
		require.Equal(t, 1, ids)
		require.Equal(t, 1, h.number(`SELECT count(*) FROM effectonce.consumers WHERE id_rule = $1`, tc.stored))
		require.Equal(t, 1, h.logged(tc.says), h.log)
	})
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
	h.untilEffects(3, h.run(consumer.Each(effect), func(c *consumer.Config) {
		c.HandlerTimeout = 500 * time.Millisecond
		c.IDFunc = func(msg *consumer.Message) []byte {
			if string(msg.Value) == "slow" && calls.Add(1) == 1 {
				<-left
			}
			return msg.Value
		}
	}))
	require.Equal(t, []string{"a", "slow", "b"}, h.values())
	require.Empty(t, h.parked())
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
