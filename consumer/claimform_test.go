package consumer_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/consumer"
)

// play runs batches through the choice of forms as the engine does, and counts the tries and those
// that failed.
func play(f *consumer.ClaimForm, batches int, duplicate func(batch int) bool) (tries, failed int) {
	for batch := range batches {
		found := 0
		if duplicate(batch) {
			found = 1
		}
		if f.Trusts() {
			tries++
			if found == 0 {
				f.Succeeded()
				continue
			}
			failed++
			f.Refused()
		}
		f.Asked(found)
	}
	return tries, failed
}

// The first batch asks. Then batches are taken as fresh for as long as they are.
func TestFreshBatchesAreTakenAsFresh(t *testing.T) {
	t.Parallel()
	f := consumer.NewClaimForm()
	tries, failed := play(f, 1000, func(int) bool { return false })
	assert.Equal(t, 999, tries)
	assert.Zero(t, failed)
}

// A run of duplicates costs one failed try, however long it is, and soon after its end batches are
// taken as fresh again.
func TestARunOfDuplicatesCostsOneTry(t *testing.T) {
	t.Parallel()
	for _, length := range []int{1, 2, 100, 500} {
		f := consumer.NewClaimForm()
		tries, failed := play(f, 1000, func(batch int) bool { return batch >= 300 && batch < 300+length })
		assert.Equal(t, 1, failed, length)
		assert.Equal(t, 1000-1-length-2*consumer.CleanMin+1, tries, length) // the first, the run but the try itself, and those behind it
	}
}

// If duplicates are everywhere, nearly no try is wasted; if they are in every second batch, few
// are.
func TestFailedTriesGetRare(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	for _, tc := range []struct {
		share float64
		most  int
	}{{1, 0}, {0.99, 10}, {0.9, 40}, {0.5, 120}} {
		f := consumer.NewClaimForm()
		_, failed := play(f, 10_000, func(int) bool { return random.Float64() < tc.share })
		assert.LessOrEqual(t, failed, tc.most, tc.share)
	}
}

// After a failed try the next one takes more batches without a duplicate, up to a bound; a run of
// good tries resets that.
func TestTriesAreRarerAfterEachFailure(t *testing.T) {
	t.Parallel()
	f := consumer.NewClaimForm()
	clean := func() (n int) {
		for !f.Trusts() {
			f.Asked(0)
			n++
		}
		return n
	}
	assert.Equal(t, consumer.CleanMin, clean())
	for want := 2 * consumer.CleanMin; want < 10*consumer.CleanMax; want *= 2 {
		f.Refused()
		f.Asked(1)
		assert.Equal(t, min(want, consumer.CleanMax), clean())
	}
	for range consumer.GoodRun {
		f.Succeeded()
	}
	f.Refused()
	assert.Equal(t, 2*consumer.CleanMin, clean())
}
