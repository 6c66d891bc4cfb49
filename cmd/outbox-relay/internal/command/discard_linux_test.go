package command_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// terminalPair is a pseudo terminal: what a person types into the first comes out of the second.
func terminalPair(t *testing.T) (person, program *os.File) {
	t.Helper()
	person, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = person.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(person.Fd()), unix.TIOCSPTLCK, 0))
	n, err := unix.IoctlGetInt(int(person.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	program, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = program.Close() })
	return person, program
}

// Property: more than one row is only discarded with a yes: --yes, or typed at a terminal that
// shows the rows and their number. Without a terminal, and with any other answer, nothing is
// changed.
func TestDiscardOfSeveralAsks(t *testing.T) {
	t.Parallel()
	address, conn := deadDatabase(t)
	for _, args := range [][]string{{"--all"}, {"1", "--all-of-key"}, {"--all", "--json"}} {
		r := runOn(t, address, append([]string{"dead", "discard", "--why", "test"}, args...)...)
		assert.Equal(t, 2, r.code, args)
		assert.Contains(t, r.stderr, "--yes confirms", args)
		assert.Empty(t, r.stdout)
	}
	assert.Contains(t, runOn(t, address, "dead", "discard", "--all", "--why", "test").stderr, "error: 3 rows would be discarded, and are never published: --dry-run shows them")
	assert.Equal(t, asBuried, deadRows(t, conn))

	typed := func(answer string) (code int, shown string) {
		person, program := terminalPair(t)
		cmd, _ := process(t, map[string]string{"OUTBOX_DATABASE_URL": address}, "dead", "discard", "--topic", "orders", "--why", "test")
		out := newOutput()
		cmd.Stdin, cmd.Stdout, cmd.Stderr = program, out, out
		require.NoError(t, cmd.Start())
		out.await(t, "discard 2 rows? They are never published. Type yes: ")
		_, err := person.WriteString(answer)
		require.NoError(t, err)
		_ = cmd.Wait()
		return cmd.ProcessState.ExitCode(), out.String()
	}
	for _, no := range []string{"y\n", "\x04"} {
		code, shown := typed(no)
		assert.Equal(t, 2, code, shown)
		assert.Contains(t, shown, "too_large", "the rows are shown")
		assert.Equal(t, asBuried, deadRows(t, conn))
	}
	code, shown := typed("yes\n")
	assert.Zero(t, code, shown)
	assert.Equal(t, "2 behind, 3 behind, 5 held", strings.Join(deadRows(t, conn), ", "))
	assert.Zero(t, runOn(t, address, "dead", "discard", "--topic", "payments", "--why", "test").code, "one is not asked about")
}
