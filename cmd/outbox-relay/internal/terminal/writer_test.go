package terminal_test

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/terminal"
)

// Property: all output is escaped, also if a character is written in two pieces; a program reads
// back the original.
func TestEveryWriteIsEscaped(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct{ in, want string }{
		{"plain: ß☃😀\n\ta\n", "plain: ß☃😀\n\ta\n"},
		{"\x1b]0;x\x07", `\u001b]0;x\u0007`},
		{"\u009b2J\x7f\u202e\u2028\u00a0", `\u009b2J\u007f\u202e\u2028\u00a0`},
		{"\U000e0041", `\udb40\udc41`},
		{"\xff\xfea", `\xff\xfea`},
		{"\ufffd", "\ufffd"},
		{"a\xe2\x98", `a\xe2\x98`},
	} {
		for _, size := range []int{1, 2, 3, 1000} {
			assert.Equal(t, tc.want, printed(tc.in, size), "in pieces of %d bytes", size)
		}
	}
	text, err := json.Marshal("\u009b\x7f\u202e\U000e0041")
	require.NoError(t, err)
	var back string
	require.NoError(t, json.Unmarshal([]byte(printed(string(text), 2)), &back))
	assert.Equal(t, "\u009b\x7f\u202e\U000e0041", back)
}

// printed is what appears of a text that is written in pieces of this many bytes.
func printed(text string, size int) string {
	var out strings.Builder
	w := terminal.NewWriter(&out)
	for piece := range slices.Chunk([]byte(text), size) {
		_, _ = w.Write(piece)
	}
	w.Flush()
	return out.String()
}
