package relay

import (
	"encoding/json"
	"math"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Property: a snapshot is accepted only if it is the text that PostgreSQL writes for its parts, with
// open transactions in order between xmin and xmax.
func FuzzSnapshot(f *testing.F) {
	for _, text := range []string{
		"1:1:", "10:20:10,14,15", "740:740:", "3:9223372036854775807:3", "", ":", "::", "0:0:", "1:2:3", "2:1:", "0x1:2:",
		"1:5:2,2", "1:5:3,2", "1:5:2,", "1:5:,2", "01:5:", "+1:5:", "1:5: 2", "1:5:2:3", "1:5x:", "1_0:20:", "9223372036854775808:9223372036854775809:",
	} {
		f.Add(text, int64(0))
	}
	f.Fuzz(func(t *testing.T, text string, seqLast int64) {
		tick, err := newTick(text, seqLast)
		if err != nil {
			require.Nil(t, tick)
			require.Less(t, len(err.Error()), 1000)
			return
		}
		written := strconv.FormatUint(tick.xmin, 10) + ":" + strconv.FormatUint(tick.xmax, 10) + ":"
		next := tick.xmin
		for i, open := range tick.xip {
			id, err := strconv.ParseUint(open, 10, 64)
			require.NoError(t, err)
			require.True(t, next <= id && id < tick.xmax, "%s is not between xmin, the one before and xmax", open)
			next = id + 1
			if i > 0 {
				written += ","
			}
			written += strconv.FormatUint(id, 10)
		}
		require.Equal(t, text, written)
		require.True(t, 0 < tick.xmin && tick.xmin <= tick.xmax && tick.xmax <= math.MaxInt64)
		require.Equal(t, seqLast, tick.seqLast)
	})
}

// Property: a progress record that can be read names the same place after it was written again, and
// the same dead rows.
func FuzzProgressRecord(f *testing.F) {
	for _, text := range []string{
		`{"system_identifier":7,"timeline":1,"epoch":3,"published":9,"from":{"tick":4,"snapshot":"10:12:10","seq_last":8},"seq":5,"floor":2}`,
		`{"epoch":1,"from":{"snapshot":"1:1:"},"to":{"snapshot":"1:2:1"},"dead":{"too_large":[5,1,2]},"revived":[1]}`,
		`{"from":{"snapshot":"1:1"}}`, `{"from":{"snapshot":"1:1:"},"to":{"snapshot":"x"}}`, `[]`, `null`, `{"dead":{"":[9223372036854775807,1]},"from":{"snapshot":"1:1:"}}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var read, again entry
		if json.Unmarshal(text, &read) != nil {
			return
		}
		at, err := read.cursor()
		if err != nil {
			return
		}
		written, err := json.Marshal(read)
		require.NoError(t, err)
		require.NoError(t, json.Unmarshal(written, &again))
		same, err := again.cursor()
		require.NoError(t, err)
		require.Equal(t, at, same)
		require.True(t, at.from.stored && at.from.found, "it is not stored a second time")
		dead := 0
		for _, above := range read.Dead {
			dead += len(above)
		}
		require.Len(t, read.verdicts().seqs, dead)
		require.ElementsMatch(t, read.verdicts().seqs, again.verdicts().seqs)
	})
}

// Property: a rule that is accepted has one verdict, and reads the same after it was written again.
func FuzzRule(f *testing.F) {
	for _, text := range []string{
		"topic=a.*;to=b", "drop", " topic=x ; header=h ; value=v ; keep", "to=", "to=a;drop", "topic", "topic=[;drop", ";", "keep;keep", "to=a=b", "value=\\x3b;keep",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rule, err := ParseRule(text)
		if err != nil {
			require.Less(t, len(err.Error()), 5000) // quoted, and cut
			return
		}
		require.False(t, rule.Drop && rule.To != "", "one verdict")
		written := ""
		for _, part := range []struct{ name, value string }{{"topic", rule.Topic}, {"header", rule.Header}, {"value", rule.Value}} {
			require.NotContains(t, part.value, ";")
			if part.value != "" {
				written += part.name + "=" + part.value + ";"
			}
		}
		switch {
		case rule.To != "":
			written += "to=" + rule.To
		case rule.Drop:
			written += "drop"
		default:
			written += "keep"
		}
		again, err := ParseRule(written)
		require.NoError(t, err, written)
		require.Equal(t, rule, again)
		_ = Routes{Rules: []Rule{rule}}.Validate()
	})
}

// Property: a horizon that is accepted waits for at least one standby, names none that is empty, and
// reads the same after it was written again.
func FuzzHorizon(f *testing.F) {
	for _, text := range []string{"", "any", "a", "a, b", "2 of a,b", "2 of any", "0 of a", "101 of a", "2 of", "2 of ", " of a", "a of b", "1 of 2 of a", "any,a", ","} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		h, err := parseHorizon(text)
		if err != nil || text == "" {
			require.Nil(t, h)
			return
		}
		require.True(t, h.count >= 1 && h.count <= horizonMax)
		list := "any"
		if h.names != nil {
			list = strings.Join(h.names, ",")
		}
		for _, name := range h.names {
			require.NotEmpty(t, strings.TrimSpace(name))
		}
		again, err := parseHorizon(strconv.Itoa(h.count) + " of " + list)
		require.NoError(t, err)
		require.Equal(t, h, again)
	})
}
