package cli_test

import (
	"errors"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/cli"
)

// Row S3 of guarantees.md: a setting that holds the URL does not show it, however it is formatted.
func TestSecretsDoNotFormat(t *testing.T) {
	t.Parallel()
	text := cli.FormatSettings("postgres://user:CANARY@host/db")
	assert.NotContains(t, text, "CANARY")
	assert.Contains(t, text, "(hidden)")
}

// Property: invalid flags and the problems of each check are reported together. A problem that only
// follows from an invalid flag is not.
func TestChecksAreReportedWithInvalidFlags(t *testing.T) {
	t.Parallel()
	environment := map[string]string{"OUTBOX_NUMBER": "ten", "OUTBOX_PAUSE": "2s"}
	s := cli.NewSettings(func(name string) (string, bool) { value, found := environment[name]; return value, found })
	var number int
	var pause time.Duration
	cmd := cli.Offline(&cobra.Command{Use: "x"})
	s.AddFlags(cmd.Flags())
	cli.AddInt(cmd.Flags(), &number, "number", 1, 1, 9, "a number")
	cli.AddDuration(cmd.Flags(), &pause, "pause", time.Second, time.Second, time.Minute, "a pause")
	s.Check(cmd, func() error { return errors.Join(errors.New("--number is missing"), errors.New("--topic is missing")) })
	s.Check(cmd, func() error { return errors.New("--group is missing") })
	require.EqualError(t, s.Resolve(cmd), "OUTBOX_NUMBER \"ten\": want a number, 1 to 9\n--topic is missing\n--group is missing")
	assert.False(t, s.Resolved())
	assert.Equal(t, 2*time.Second, pause)
}
