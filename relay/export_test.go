package relay

import "context"

// FetchSQL is the statement of the plan's test.
const FetchSQL = fetchSQL

// FetchSettingsSQL goes before it.
const FetchSettingsSQL = fetchSettingsSQL

// TidyUp is a run of the upkeep of slots.
func (r *Relay) TidyUp(ctx context.Context) error { return r.tidyUp(ctx, r.askCluster(ctx)) }
