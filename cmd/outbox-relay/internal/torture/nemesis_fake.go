package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/effectonce/effectonce/internal/pause"
)

// answers are errors that brokers give, and after which a client tries again. After some of them the
// request was carried out.
func answers() map[kmsg.Key][]*kerr.Error {
	coordinator := []*kerr.Error{kerr.NotCoordinator, kerr.CoordinatorLoadInProgress, kerr.CoordinatorNotAvailable}
	return map[kmsg.Key][]*kerr.Error{
		kmsg.Produce:            {kerr.NotLeaderForPartition, kerr.NotEnoughReplicas, kerr.RequestTimedOut, kerr.NotEnoughReplicasAfterAppend},
		kmsg.EndTxn:             append([]*kerr.Error{kerr.ConcurrentTransactions}, coordinator...),
		kmsg.AddPartitionsToTxn: append([]*kerr.Error{kerr.ConcurrentTransactions}, coordinator...),
		kmsg.InitProducerID:     append([]*kerr.Error{kerr.ConcurrentTransactions}, coordinator...),
		kmsg.OffsetCommit:       append([]*kerr.Error{kerr.RequestTimedOut}, coordinator...),
		kmsg.Heartbeat:          {kerr.NotCoordinator, kerr.CoordinatorNotAvailable, kerr.RebalanceInProgress},
		kmsg.FindCoordinator:    {kerr.CoordinatorNotAvailable},
		kmsg.Fetch:              {kerr.NotLeaderForPartition, kerr.UnknownTopicOrPartition, kerr.OffsetNotAvailable},
	}
}

// kafkaErrors makes kfake answer a part of the requests with errors, and lose the answers to some ends
// of transactions, for a while.
func (n *nemesis) kafkaErrors(ctx context.Context, d time.Duration, random *rand.Rand) (string, error) {
	fake := n.arena.kafka.Fake
	oneIn := pick(random, 2, 4, 16)
	dice := &dice{random: rand.New(rand.NewPCG(random.Uint64(), 1)), sides: oneIn} //nolint:gosec // a seed
	var faults []kfake.Fault
	for key, errs := range answers() {
		for _, err := range errs {
			faults = append(faults, kfake.Fault{Keys: []kmsg.Key{key}, Err: err, Count: -1, When: func(kmsg.Request) bool { return dice.hit(len(errs)) }})
		}
	}
	handle := fake.Fault(faults...)
	lost := n.loseAnswers(ctx, fake, dice)
	pause.For(ctx, d)
	handle.Remove()
	return fmt.Sprintf("one in %d: %d errors, %d lost answers", oneIn, handle.Hits(), lost()), nil
}

// dice are thrown by one request at a time.
type dice struct {
	mu     sync.Mutex
	random *rand.Rand
	sides  int
}

func (d *dice) hit(times int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.random.IntN(d.sides*times) == 0
}

var errLostAnswer = errors.New("the connection is closed without an answer")

// carryOutMax is how long a broker may take to carry out a request whose answer is lost.
const carryOutMax = 5 * time.Second

// loseAnswers has some ends of transactions carried out on another connection, and then closes the
// connection that asked, until lost is called. lost returns how many.
func (n *nemesis) loseAnswers(ctx context.Context, fake *kfake.Cluster, dice *dice) (lost func() int) {
	var over atomic.Bool
	var count atomic.Int64
	var mu sync.Mutex
	repeated := map[string]bool{} // requests that come back to the control function
	fake.ControlKey(int16(kmsg.EndTxn), func(request kmsg.Request) (kmsg.Response, error, bool) {
		r, ok := request.(*kmsg.EndTxnRequest)
		if !ok || over.Load() {
			fake.DropControl()
			return nil, nil, false
		}
		name := fmt.Sprint(r.TransactionalID, r.ProducerID, r.ProducerEpoch, r.Commit)
		mu.Lock()
		again := repeated[name]
		delete(repeated, name)
		if again || !dice.hit(1) {
			mu.Unlock()
			return nil, nil, false
		}
		repeated[name] = true
		mu.Unlock()
		fake.KeepControl()
		node, same := fake.CurrentNode(), *r
		fake.SleepControl(func() {
			limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), carryOutMax)
			defer cancel()
			if _, err := n.client.Broker(int(node)).Request(limited, &same); err == nil {
				count.Add(1)
			}
		})
		return nil, errLostAnswer, true
	})
	return func() int {
		over.Store(true)
		return int(count.Load())
	}
}
