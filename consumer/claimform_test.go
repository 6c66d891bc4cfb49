package consumer_test

import (
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
