package doctor

import (
	"context"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/human"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/operator"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/pipeline"
)

// statusAgeMax is how long a row may wait: the default of "status".
const statusAgeMax = time.Minute

// Pipeline reports the problems of pipeline.ReadStatus as failures, and its notes as warnings.
func Pipeline(ctx context.Context, db operator.Querier, schema string, lagAgeMax time.Duration) (found []Finding) {
	const check, remedy = "status", "as the message says; outbox-relay status shows the numbers"
	s, err := pipeline.ReadStatus(ctx, db, schema, pipeline.StatusOptions{AgeMax: statusAgeMax, LagAgeMax: lagAgeMax})
	if err != nil {
		return broken(check, err)
	}
	for _, problem := range s.Problems {
		found = append(found, fail(check, remedy, "%s", problem))
	}
	for _, note := range s.Notes {
		found = append(found, warn(check, remedy, "%s", note))
	}
	return orElse(found, ok(check, "well, with %s and %s", human.Count(len(s.Replicas), "replica"), human.Count(len(s.Consuming), "consumer")))
}
