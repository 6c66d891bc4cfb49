package consumer

import "sync"

// claimForm chooses how the next batch of a lane claims. It either takes every message as fresh,
// which is cheaper and fails if one is a duplicate, or asks for each message. The same constraint
// decides both; the choice affects only cost. A failed try costs about as much as a successful one
// saves. Duplicates come in runs (a redelivery after a restart, a producer that retries), so a
// duplicate makes more of them likely in the next batches.
//
// It has a mutex because an abandoned handler may still hold the transaction of a batch while its
// lane runs the next attempt.
type claimForm struct {
	mu   sync.Mutex
	asks int // number of further batches without a duplicate that must ask
	wait int // value of asks after the next duplicate
	kept int // consecutive successful tries
}

// Number of batches without a duplicate before the next try: it doubles after each failed try, and
// returns to cleanMin after goodRun successful ones. cleanMax is 50,000 messages in batches of the
// default size.
const (
	cleanMin = 1
	cleanMax = 100
	goodRun  = 20
)

// newClaimForm returns a form that asks first: after a restart the first messages may be the last
// committed ones.
func newClaimForm() *claimForm { return &claimForm{asks: cleanMin, wait: cleanMin} }

// trusts reports whether to take the next batch as fresh.
func (f *claimForm) trusts() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asks <= 0
}

// asked records the result of a batch that asked.
func (f *claimForm) asked(duplicates int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if duplicates > 0 {
		f.asks = f.wait
	} else {
		f.asks--
	}
}

// refused records a try that failed. The batch then asks.
func (f *claimForm) refused() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kept = 0
	f.wait = min(2*f.wait, cleanMax)
	f.asks = f.wait
}

// succeeded records a try without a duplicate.
func (f *claimForm) succeeded() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept++; f.kept >= goodRun {
		f.wait = cleanMin
	}
}
