package httpkey

import (
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/effectonce/effectonce/dedup/idempotency"
)

// weakEvery is how often weak keys of an operation are warned of at most: whoever can mend it needs to hear it once.
const weakEvery = time.Hour

// weakKeys warns of the keys that clients of one operation send. A Checker tells of each weakness by itself; a counter alone
// has three, and one warning is enough.
type weakKeys struct {
	checker *idempotency.Checker
	log     *slog.Logger
	begun   time.Time
	next    atomic.Int64 // since begun, in ns: before that, nothing is said
}

func newWeakKeys(log *slog.Logger) (*weakKeys, error) {
	k := &weakKeys{log: log, begun: time.Now()}
	checker, err := idempotency.NewChecker(idempotency.CheckerConfig{OperationsMax: 1, Every: weakEvery, Found: k.found})
	k.checker = checker
	return k, err
}

func (k *weakKeys) see(key idempotency.Key) { k.checker.See(key) }

// found is called in the goroutine of a request, and others' at the same time.
func (k *weakKeys) found(f idempotency.Finding) {
	now, next := int64(time.Since(k.begun)), k.next.Load()
	if now < next || !k.next.CompareAndSwap(next, now+int64(weakEvery)) {
		return
	}
	k.log.Warn("clients send weak idempotency keys: two requests may get the same one, and the second the first one's answer; have them send a UUID for each new request",
		"operation", f.Operation, "weakness", f.Weakness, "keys", f.Keys, "of", f.Of)
}
