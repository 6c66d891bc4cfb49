package longtest_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/effectonce/effectonce/internal/longtest"
)

// Property: a long test runs only when the variable says so, and the skip names the variable.
func TestOnlyAsksTheEnvironment(t *testing.T) {
	for value, want := range map[string]struct{ ran, failed bool }{
		"": {}, "0": {}, "false": {}, "1": {ran: true}, "true": {ran: true}, "yes": {failed: true},
	} {
		t.Run(value, func(t *testing.T) {
			t.Setenv(longtest.Variable, value)
			r := &recorder{TB: t}
			func() {
				defer func() { _ = recover() }()
				longtest.Only(r, "it needs time")
				r.ran = true
			}()
			assert.Equal(t, want.ran, r.ran)
			assert.Equal(t, want.failed, r.failed)
			assert.Equal(t, !want.ran && !want.failed, r.skipped)
			if r.skipped {
				assert.Contains(t, r.text, "it needs time")
				assert.Contains(t, r.text, "EFFECTONCE_LONG=1")
			}
		})
	}
}

// recorder notes how a test would have ended.
type recorder struct {
	testing.TB
	ran, failed, skipped bool
	text                 string
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failed, r.text = true, fmt.Sprintf(format, args...)
	panic("the test ends")
}

func (r *recorder) Skipf(format string, args ...any) {
	r.skipped, r.text = true, fmt.Sprintf(format, args...)
	panic("the test ends")
}
