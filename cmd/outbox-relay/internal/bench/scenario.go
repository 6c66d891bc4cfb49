package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Scenarios of Relay.
const (
	ScenarioDrain   = "drain"   // a backlog, by each variant
	ScenarioProcess = "process" // a process that runs only the relay
	ScenarioLatency = "latency" // from commit to consumable, at 500 messages a second
	ScenarioIdle    = "idle"    // a relay without work
	ScenarioLoad    = "load"    // a steady load, with the CPU time that it takes
	ScenarioBacklog = "backlog" // backlogs of several sizes, with the memory that they take
	ScenarioNetwork = "network" // a steady load, with PostgreSQL a round trip away
	ScenarioPooler  = "pooler"  // a steady load through PgBouncer
	ScenarioShards  = "shards"  // four replicas, with PostgreSQL a round trip away
)

// Scenarios returns all scenarios in the order in which they run, and those that run by default.
func Scenarios() (all, standard []string) {
	standard = []string{ScenarioDrain, ScenarioProcess, ScenarioLatency, ScenarioIdle}
	return append(slices.Clone(standard), ScenarioLoad, ScenarioBacklog, ScenarioNetwork, ScenarioPooler, ScenarioShards), standard
}

// ParseScenarios parses names separated by commas, or "all". An empty text means the standard ones.
func ParseScenarios(text string) ([]string, error) {
	all, standard := Scenarios()
	switch text {
	case "":
		return standard, nil
	case "all":
		return all, nil
	}
	var named []string
	for name := range strings.SplitSeq(text, ",") {
		if !slices.Contains(all, name) {
			return nil, fmt.Errorf("want all, or some of %s, separated by commas", strings.Join(all, ", "))
		}
		named = append(named, name)
	}
	return named, nil
}

// ParseBacklogRows parses numbers of rows separated by commas.
func ParseBacklogRows(text string) (sizes []int, err error) {
	for part := range strings.SplitSeq(text, ",") {
		rows, err := strconv.Atoi(part)
		if err != nil || rows < BacklogRowsMin || rows > BacklogRowsMax {
			return nil, fmt.Errorf("want numbers from %d to %d, separated by commas", BacklogRowsMin, BacklogRowsMax)
		}
		sizes = append(sizes, rows)
	}
	return sizes, nil
}
