// Package bounds applies defaults and bounds to the settings that the configurations of this module
// share.
package bounds

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"
)

// Duration is a setting with its default and its bounds.
type Duration struct {
	Field             string
	Value             *time.Duration
	Default, Min, Max time.Duration
}

// Range is the default and the bounds of a duration.
type Range struct{ Default, Min, Max time.Duration }

// Settings of a relay that relay.Config and the flags of outbox-relay run have in common.
//
//nolint:gochecknoglobals // immutable
var (
	Lease          = Range{Default: 10 * time.Second, Min: time.Second, Max: 10 * time.Minute}
	PollMin        = Range{Default: 700 * time.Microsecond, Min: 100 * time.Microsecond, Max: time.Minute}
	PollMax        = Range{Default: 250 * time.Millisecond, Min: time.Millisecond, Max: time.Minute}
	TransactionMax = Range{Default: 200 * time.Millisecond, Min: time.Millisecond, Max: 10 * time.Second}
	Keep           = Range{Default: 10 * time.Minute, Min: 100 * time.Millisecond, Max: 30 * 24 * time.Hour}
	DrainMax       = Range{Default: 10 * time.Second, Min: time.Millisecond, Max: 10 * time.Minute}
)

// Of returns the setting of a field that has these bounds.
func (r Range) Of(field string, value *time.Duration) Duration {
	return Duration{Field: field, Value: value, Default: r.Default, Min: r.Min, Max: r.Max}
}

// Durations sets each zero setting to its default, and returns a problem for each one out of
// bounds.
func Durations(settings ...Duration) (problems []error) {
	for _, s := range settings {
		*s.Value = cmp.Or(*s.Value, s.Default)
		if *s.Value < s.Min || *s.Value > s.Max {
			problems = append(problems, fmt.Errorf("%s %v: want %v to %v", s.Field, *s.Value, s.Min, s.Max))
		}
	}
	return problems
}

// Int is a setting with its default and its bounds.
type Int struct {
	Field             string
	Value             *int
	Default, Min, Max int
}

// Ints does the same as Durations.
func Ints(settings ...Int) (problems []error) {
	for _, s := range settings {
		*s.Value = cmp.Or(*s.Value, s.Default)
		if *s.Value < s.Min || *s.Value > s.Max {
			problems = append(problems, fmt.Errorf("%s %d: want %d to %d", s.Field, *s.Value, s.Min, s.Max))
		}
	}
	return problems
}

// Problem returns an error about a setting.
func Problem(field string, value any, want string) error {
	return fmt.Errorf("%s %v: want %s", field, value, want)
}

// errorBytesMax bounds stored error texts; the schema checks the same.
const errorBytesMax = 2048

// ErrorText makes an error storable: limited in size, valid UTF-8, without NUL.
func ErrorText(err error) string {
	if err == nil {
		return ""
	}
	text := strings.ReplaceAll(strings.ToValidUTF8(err.Error(), "\uFFFD"), "\x00", "")
	// The cut may have split a character
	return strings.ToValidUTF8(text[:min(len(text), errorBytesMax)], "")
}

// Owner names this process for people who read leases and positions: host name, process number and
// four random bytes, at most 255 bytes.
func Owner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails: crypto/rand documents it
	return fmt.Sprintf("%.200s-%d-%s", host, os.Getpid(), hex.EncodeToString(random[:]))
}
