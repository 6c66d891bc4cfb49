package mutants

import "context"

// Caught is a mutant that the engine's own tests find, without the torture run.
type Caught struct {
	Mutant  Mutant
	Package string // of the test, below the module
	Name    string // of the test
}

// Test runs the test against the mutant, and returns the test's output, with an error if it failed,
// as it should.
func (c Caught) Test(ctx context.Context, module string) (said []byte, err error) {
	return c.Mutant.run(ctx, module, "test", "-count=1", "-timeout=10m", "-run=^"+c.Name+"$", "./"+c.Package)
}

// AllCaught returns bugs that no test found once, each with the test that finds it now.
func AllCaught() []Caught {
	known := map[string]Mutant{}
	for _, m := range All() {
		known[m.Name] = m
	}
	return []Caught{
		{known["truncate-ignores-open"], "relay", "TestRowsOfAnOpenTransactionKeepTheirSlot"},
		{known["release-opens-other-keys"], "consumer", "TestRetryReleasesOneKey"},
		{known["publish-at-once"], "consumer", "TestHandlersPublishLast"},
		{known["rewind-by-offsets-ignored"], "consumer", "TestOperatorsRewindIsObeyed"},
		{known["expiry-by-own-clock"], "consumer", "TestWrongClocksOfProducers"},
		{known["released-not-claimed"], "consumer", "TestReleasedMessageIsClaimedAgain"},
		{known["large-parked-never-leaves"], "consumer", "TestReleaseOfALargeMessage"},
		{known["prune-takes-ticks-in-use"], "relay", "TestTickOfProgressIsKept"},
		{known["tick-is-not-durable"], "relay", "TestTicksAreDurable"},
		{Mutant{
			Name: "days-are-looked-at-once", File: "dedup/days.go",
			Old:  "days, err = m.empty(ctx, tx)\n",
			New:  "\n",
			What: "a day of claims is dropped without a second look behind the lock",
		}, "dedup", "TestClaimBeforeTheLockKeepsItsDay"},
		{known["token-not-checked"], "dedup/idempotency", "TestEveryWriteOfAHolderChecksTheToken"},
		{Mutant{
			Name: "phase-token-not-checked", File: "migrations/0007_flow.up.sql",
			Old:  "AND lock_token = p_token AND coalesce(state, '') = 'running'\n    AND p_phase <> ALL (phases);",
			New:  "AND p_phase <> ALL (phases);",
			What: "a worker that lost a key commits its phase",
		}, "dedup/idempotency", "TestEveryWriteOfAHolderChecksTheToken"},
		{known["check-ignores-epoch"], "migrations", "TestCheckPositionFencesFormerHolders"},
		{known["one-call-key-for-all-groups"], "consumer", "TestCallKeysAreOfTheConsumer"},
		{known["seq-safe-too-late"], "relay", "TestProgressOfLaterThanTheSnapshotDoesNotCount"},
	}
}
