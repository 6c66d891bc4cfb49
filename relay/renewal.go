package relay

import (
	"errors"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// errRenewed means that the client of a shard raised its producer epoch after an error: see renewal.
var errRenewed = errors.New("the client gave up records and wants to continue behind them: the work starts over from stored progress")

// renewedMax bounds the time from a new epoch to the first failure that a promise tells.
const renewedMax = 5 * time.Second

// renewal is the log of a shard's client, in front of the caller's. When a batch has failed for good,
// franz-go fails what it has of that partition, and continues under a new epoch of its producer ID with
// what is handed over later. Those rows would be published before the failed ones, which are read again.
// The client tells the promises of the failed records too late for that: a page may be handed over in
// between. But it logs that there will be a new epoch before it uses it, and at once all records are void.
type renewal struct {
	log     kgo.Logger // nil: none
	renewed func()
}

// renewal returns what a client needs besides its options. A transaction is void after a failure.
func (p *publisher) renewal() []kgo.Opt {
	if p.cfg.ExactlyOnce {
		return nil
	}
	return []kgo.Opt{kgo.WithLogger(&renewal{p.clientLog, func() {
		if p.alone.Load() {
			return
		}
		p.flight.void(errRenewed)
		// The promises tell the cause, which may be a row that is wrong.
		time.AfterFunc(renewedMax, func() { p.flight.makeVoid(errRenewed) })
	}})}
}

func (r *renewal) Level() kgo.LogLevel {
	if r.log == nil {
		return kgo.LogLevelInfo
	}
	return max(r.log.Level(), kgo.LogLevelInfo)
}

func (r *renewal) Log(level kgo.LogLevel, msg string, keyvals ...any) {
	if strings.HasPrefix(msg, "producer ID failed") {
		r.renewed()
	}
	if r.log != nil && r.log.Level() >= level {
		r.log.Log(level, msg, keyvals...)
	}
}
