package monitor

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
)

// Bounds of a token.
const (
	TokenBytesMin = 16
	TokenBytesMax = 1024
)

// Token is the token that a caller has to present. Only its hash is kept, so it cannot be printed.
// The zero value admits no caller.
type Token struct{ hash *[sha256.Size]byte }

// LogValue hides even the hash.
func (t Token) LogValue() slog.Value { return slog.StringValue("(hidden)") }

// Set reports whether there is a token.
func (t Token) Set() bool { return t.hash != nil }

// ReadToken reads the only line of a file. Its errors never quote the file.
func ReadToken(path string) (Token, error) {
	file, err := os.Open(path) //nolint:gosec // the operator names it
	if err != nil {
		return Token{}, errors.New("cannot be opened: want a file that holds the token")
	}
	defer func() { _ = file.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(file, TokenBytesMax+3))
	if err != nil {
		return Token{}, errors.New("cannot be read: want a file that holds the token")
	}
	return newToken(bytes.TrimRight(text, "\r\n"))
}

func newToken(text []byte) (Token, error) {
	if len(text) < TokenBytesMin || len(text) > TokenBytesMax {
		return Token{}, fmt.Errorf("holds a token of a wrong length: want %d to %d bytes, for example from: openssl rand -hex 32", TokenBytesMin, TokenBytesMax)
	}
	// A token that a header cannot carry could never be presented.
	if bytes.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return Token{}, errors.New("holds a token with spaces, control or other characters: want one line of printable ASCII")
	}
	hash := sha256.Sum256(text)
	return Token{&hash}, nil
}

// fits takes the same time for every header: the hashes have one length, and are compared as a
// whole.
func (t Token) fits(header string) bool {
	scheme, shown, _ := strings.Cut(header, " ")
	hash := sha256.Sum256([]byte(shown))
	return t.hash != nil && strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(hash[:], t.hash[:]) == 1
}

// guard admits only callers with the token.
func (t Token) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !t.fits(r.Header.Get("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "want the header Authorization: Bearer with the token of --admin-token-file", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
