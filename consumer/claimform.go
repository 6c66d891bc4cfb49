package consumer

import "sync"

// claimForm chooses how the next batch of a lane claims: taking every message as fresh, which is cheaper and fails
// where one is a duplicate, or asking for each. The same constraint decides both; the choice is about cost alone.
// A failed try costs about as much as it saves in a batch without duplicates. Duplicates come in runs (a redelivery
// after a restart, a producer that tries again), so one of them speaks against the batches that follow.
//
// A handler that was given up may still have the transaction of a batch while its lane is at the next attempt.
type claimForm struct {
	mu   sync.Mutex
	asks int // so many more batches without a duplicate have to ask
	wait int // how many have to after the next duplicate
	kept int // tries in a row that succeeded
}

// How many batches without a duplicate it takes before the next try: twice as many after each failed one, and the least
// again after a run of good ones. The most is 50,000 messages, in batches of the usual size.
const (
	cleanMin = 1
	cleanMax = 100
	goodRun  = 20
)

// newClaimForm begins by asking: after a restart the first messages may be those that were committed last.
func newClaimForm() *claimForm { return &claimForm{asks: cleanMin, wait: cleanMin} }

// trusts reports whether the next batch is to be taken as fresh.
func (f *claimForm) trusts() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asks <= 0
}

// asked notes how a batch that asked came out.
func (f *claimForm) asked(duplicates int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if duplicates > 0 {
		f.asks = f.wait
	} else {
		f.asks--
	}
}

// refused notes a try that met a duplicate. The batch asks next.
func (f *claimForm) refused() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.kept = 0
	f.wait = min(2*f.wait, cleanMax)
	f.asks = f.wait
}

// succeeded notes a try that met none.
func (f *claimForm) succeeded() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.kept++; f.kept >= goodRun {
		f.wait = cleanMin
	}
}
