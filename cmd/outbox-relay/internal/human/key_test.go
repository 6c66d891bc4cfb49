package human_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
)

// What is shown of a key names this key and no other, and does nothing to a terminal.
func FuzzKeyText(f *testing.F) {
	for _, key := range []string{"", "order-7", "base64:", "base64:AP8=", "\x00\xff", "a\x1b[31mb", "ä ö", "a\nb", "\u202e", "a\u00a0b"} {
		f.Add([]byte(key))
	}
	f.Fuzz(func(t *testing.T, key []byte) {
		text := human.Key(key).String()
		require.True(t, human.Printable(text), "%q", text)
		again, err := human.ParseKey(text)
		require.NoError(t, err)
		require.Equal(t, string(key), string(again))
	})
}
