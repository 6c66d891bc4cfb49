package doctor_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/doctor"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/relay"
)

// Property: a progress topic that was made by hand, or that keeps more than it has to, is
// named with the command that changes it; one that this release makes passes. Row O44 of
// guarantees.md.
func TestProgressTopicIsJudged(t *testing.T) {
	t.Parallel()
	fake := kafkatest.Fake(t, kfake.NumBrokers(1))
	admin := kadm.NewClient(kafkatest.ClientAt(t, fake.ListenAddrs()))
	lasts := fmt.Sprint(relay.JournalSegmentLasts.Milliseconds())
	for name, c := range map[string]struct {
		partitions int32
		configs    map[string]string
		severity   doctor.Severity
		message    string
	}{
		"now": {
			1,
			map[string]string{"cleanup.policy": "compact", "segment.bytes": fmt.Sprint(relay.JournalSegmentBytes), "segment.ms": lasts, "delete.retention.ms": lasts},
			doctor.OK, "small segments",
		},
		"before": {1, map[string]string{"cleanup.policy": "compact", "segment.ms": "3600000", "min.cleanable.dirty.ratio": "0.1"}, doctor.Warn, "segment.bytes is"},
		"marks": {
			1,
			map[string]string{"cleanup.policy": "compact", "segment.bytes": "8388608", "delete.retention.ms": "86400000"},
			doctor.Warn,
			"delete.retention.ms 86400000",
		},
		"deleted":    {1, map[string]string{"cleanup.policy": "delete"}, doctor.Warn, "not compacted"},
		"partitions": {2, map[string]string{"cleanup.policy": "compact", "segment.bytes": "8388608", "delete.retention.ms": "1000"}, doctor.Fail, "2 partitions"},
	} {
		configs := map[string]*string{}
		for key, value := range c.configs {
			configs[key] = &value
		}
		_, err := admin.CreateTopic(t.Context(), c.partitions, 1, configs, name)
		require.NoError(t, err)
		f := only(t, doctor.ProgressTopic(t.Context(), admin, name))
		assert.Equal(t, c.severity, f.Severity, name)
		assert.Contains(t, f.Message, c.message, name)
		if c.severity != doctor.OK {
			require.NotEmpty(t, f.Remedy, name)
			harmless(t, f)
		}
	}
	f := only(t, doctor.ProgressTopic(t.Context(), admin, "before"))
	assert.Contains(t, f.Remedy, "--entity-name before --add-config segment.bytes=8388608,segment.ms=600000,delete.retention.ms=600000")
	assert.Empty(t, doctor.ProgressTopic(t.Context(), admin, "not-there"))
}
