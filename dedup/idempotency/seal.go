package idempotency

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
)

// AESSealer is a Sealer with AES-256 in Galois/counter mode. Each sealed text names the key it was
// sealed with, so keys can be rotated while programs run: give all programs the new key, then make
// it the current one in all of them, and drop the old one after the longest window, when no row
// uses it. docs/how-to/secure.md, "Rotating the keys that encrypt requests", has the steps and the
// query.
//
// It encrypts headers and bodies of responses, and what flows store of requests and between phases.
// Fingerprints are HMACs. It does not encrypt statuses, error texts, or the keys themselves. It is safe for concurrent use.
// No formatting verb, logger or encoder can reach its encryption keys.
type AESSealer struct {
	current string
	named   func(name string) (sealKey, bool)
}

type sealKey struct {
	cipher.AEAD
	mac func(text []byte) []byte // HMAC-SHA256 with a key derived from this one
}

// ErrUnknownSealKey means that a text was encrypted with a key that this program does not have.
var ErrUnknownSealKey = errors.New("unknown encryption key")

var _ Sealer = (*AESSealer)(nil)

// NewAESSealer returns a sealer that encrypts with keys[current], and decrypts with any of the
// keys; or all problems at once. A key has 32 random bytes. A name has 1 to 255 bytes and is not
// secret; it must never be reused for another key. One key is good for 2^32 texts.
func NewAESSealer(keys map[string][]byte, current string) (*AESSealer, error) {
	var problems []error
	ciphers := make(map[string]sealKey, len(keys))
	for name, key := range keys {
		if name == "" || len(name) > keyBytesMax || !readable(name) {
			problems = append(problems, fmt.Errorf("name %q of an encryption key: want 1 to %d bytes of UTF-8 without control characters", name, keyBytesMax))
		}
		if len(key) != sealKeyBytes || !slices.ContainsFunc(key, func(b byte) bool { return b != 0 }) {
			problems = append(problems, fmt.Errorf("encryption key %q has %d bytes: want %d random ones", name, len(key), sealKeyBytes))
			continue
		}
		block, err := aes.NewCipher(key)
		if err == nil {
			var c cipher.AEAD
			c, err = cipher.NewGCMWithRandomNonce(block)
			secret := hash("mac", key)
			ciphers[name] = sealKey{c, func(text []byte) []byte {
				h := hmac.New(sha256.New, secret)
				h.Write(text)
				return h.Sum(nil)
			}}
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("encryption key %q: %w", name, err))
		}
	}
	if _, ok := keys[current]; !ok {
		problems = append(problems, fmt.Errorf("current encryption key %q: want the name of one of the %d keys", current, len(keys)))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	named := func(name string) (sealKey, bool) { c, ok := ciphers[name]; return c, ok }
	return &AESSealer{current: current, named: named}, nil
}

const (
	sealKeyBytes = 32
	sealVersion  = 1
	sealPrefix   = 2 // version and length of the name, before the name
)

// Seal implements Sealer: version, length of the name, name, nonce, text, tag.
func (s *AESSealer) Seal(plain, aad []byte) ([]byte, error) {
	c, _ := s.named(s.current)
	header := s.header()
	return c.Seal(header, nil, plain, boundTo(header, aad)), nil //nolint:gosec // this cipher makes a random nonce itself
}

func (s *AESSealer) header() []byte {
	return append([]byte{sealVersion, byte(len(s.current))}, s.current...)
}

// Open implements Sealer.
func (s *AESSealer) Open(sealed, aad []byte) ([]byte, error) {
	c, header, err := s.keyOf(sealed)
	if err != nil {
		return nil, err
	}
	plain, err := c.Open([]byte{}, nil, sealed[len(header):], boundTo(header, aad))
	if err != nil {
		return nil, fmt.Errorf("the text was changed, moved here from another row or column, or its key %q is not the one it was made with: %w", header[sealPrefix:], err)
	}
	return plain, nil
}

// MAC implements Sealer: version, length of the name, name, HMAC-SHA256.
func (s *AESSealer) MAC(text, like []byte) ([]byte, error) {
	if like == nil {
		like = s.header()
	}
	c, header, err := s.keyOf(like)
	if err != nil {
		return nil, err
	}
	return append(slices.Clone(header), c.mac(text)...), nil
}

// keyOf returns the key that a text was sealed with, and its header.
func (s *AESSealer) keyOf(sealed []byte) (key sealKey, header []byte, err error) {
	if len(sealed) < sealPrefix || sealed[0] != sealVersion || len(sealed) < sealPrefix+int(sealed[1]) {
		return key, nil, errors.New("the text is not one that AESSealer made")
	}
	header = sealed[:sealPrefix+int(sealed[1])]
	name := string(header[sealPrefix:])
	key, ok := s.named(name)
	if !ok {
		return key, nil, fmt.Errorf("%w %q: give it to this program, as a key that is not the current one", ErrUnknownSealKey, name)
	}
	return key, header, nil
}

// boundTo binds a text to its header, which names its key, as well as to aad.
func boundTo(header, aad []byte) []byte { return hash("sealed", header, aad) }
