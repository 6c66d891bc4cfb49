package dedup_test

import (
	"crypto/sha256"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/dedup"
)

// Property: a fingerprint is what other code computes by the documented rule. Two messages have the
// same one only if key and value are the same, byte for byte: no byte can move from one to the
// other, and nil is not empty.
func FuzzFingerprint(f *testing.F) {
	f.Add([]byte("k"), []byte("v"), []byte("k"), []byte("v"), uint8(0))
	f.Add([]byte("kv"), []byte(""), []byte("k"), []byte("v"), uint8(0))
	f.Add([]byte{}, []byte("v"), []byte{}, []byte("v"), uint8(1))
	f.Add([]byte("k"), []byte{}, []byte("k"), []byte{}, uint8(2))
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 1, 'a'}, []byte{}, []byte{}, []byte{0, 0, 0, 0, 0, 0, 0, 1, 'a'}, uint8(12))
	f.Fuzz(func(t *testing.T, key, value, otherKey, otherValue []byte, missing uint8) {
		for i, part := range []*[]byte{&key, &value, &otherKey, &otherValue} {
			if missing&(1<<i) != 0 {
				*part = nil
			}
		}
		var text []byte
		for _, part := range [][]byte{key, value} {
			length := uint64(len(part))
			if part == nil {
				length = ^uint64(0)
			}
			text = append(binary.BigEndian.AppendUint64(text, length), part...)
		}
		sum := sha256.Sum256(text)
		require.Equal(t, [16]byte(sum[:16]), dedup.Fingerprint(key, value))
		same := string(key) == string(otherKey) && string(value) == string(otherValue) && (key == nil) == (otherKey == nil) && (value == nil) == (otherValue == nil)
		require.Equal(t, same, dedup.Fingerprint(key, value) == dedup.Fingerprint(otherKey, otherValue))
	})
}
