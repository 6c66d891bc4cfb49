package verify

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kadm"
)

// noteCompaction names the compacted topics if rows are missing: the record of such a row may have
// been deleted because a later record has its key. Without the right to read a topic's settings
// there is no note.
func (r *run) noteCompaction(ctx context.Context) {
	if r.report.Missing.Count == 0 {
		return
	}
	topics := slices.DeleteFunc(slices.Clone(r.names), func(name string) bool { return len(r.extents[name]) == 0 })
	configs, err := kadm.NewClient(r.kafka.Client).DescribeTopicConfigs(ctx, topics...)
	if err != nil {
		return
	}
	for _, name := range topics {
		config, err := configs.On(name, nil)
		if err != nil || config.Err != nil {
			continue
		}
		compacts := func(c kadm.Config) bool {
			return c.Key == "cleanup.policy" && strings.Contains(c.MaybeValue(), "compact")
		}
		if slices.ContainsFunc(config.Configs, compacts) {
			r.report.Notes = append(r.report.Notes, fmt.Sprintf("topic %s is compacted: Kafka deletes a record once a later one has its key, and the row of a deleted record is reported as missing", name))
		}
	}
}
