package relay_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
	"github.com/effectonce/effectonce/internal/testwait"
	"github.com/effectonce/effectonce/relay"
)

// Property: a topic whose brokers are slow holds up no row of another relay, which is how the
// documents separate such a topic; its own rows come in order once the brokers answer. Row O34 of
// guarantees.md.
func TestSlowTopicHasARelayOfItsOwn(t *testing.T) {
	t.Parallel()
	pool, fake := pgtest.Pool(t), kafkatest.Fake(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "slow", "fast"))
	answer, hanging := make(chan struct{}), atomic.Bool{}
	slow := fake.TopicInfo("slow").TopicID
	release := sync.OnceFunc(func() { close(answer) })
	t.Cleanup(release)
	fake.ControlKey(int16(kmsg.Produce), func(request kmsg.Request) (kmsg.Response, error, bool) {
		fake.KeepControl()
		for _, topic := range request.(*kmsg.ProduceRequest).Topics {
			if topic.Topic == "slow" || topic.TopicID == slow {
				hanging.Store(true)
				fake.SleepControl(func() { <-answer })
			}
		}
		return nil, nil, false
	})
	runAt(t, pool, fake, relay.Config{Name: "bulk", Topic: func(row relay.Message) (string, bool) { return row.Topic, row.Topic == "slow" }})
	runAt(t, pool, fake, relay.Config{Topic: func(row relay.Message) (string, bool) { return row.Topic, row.Topic != "slow" }})
	insert(t, pool, "slow", "k", "0")
	testwait.True(t, "a broker takes its time", hanging.Load)
	var want []string
	for n := range 100 {
		insert(t, pool, "slow", "k", fmt.Sprint(n+1))
		insert(t, pool, "fast", "k", fmt.Sprint(n))
		want = append(want, fmt.Sprint(n))
	}
	testwait.True(t, "the other topic's rows", func() bool { return len(valuesAt(t, fake, "fast")) == len(want) })
	require.Equal(t, want, valuesAt(t, fake, "fast"))
	require.Empty(t, valuesAt(t, fake, "slow"), "the test's own premise")
	release()
	testwait.True(t, "the slow topic's rows", func() bool { return len(valuesAt(t, fake, "slow")) == len(want)+1 })
	require.Equal(t, append(want, "100"), valuesAt(t, fake, "slow"))
}
