package mutants

import "github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture"

func keyMutants() []Mutant {
	return []Mutant{
		{
			Name: "token-not-checked", File: "migrations/0004_idempotency.up.sql",
			Old:   "AND lock_token = p_token AND coalesce(state, '') = 'running'\n    AND (p_phase IS NULL OR p_phase <> ALL (phases));",
			New:   ";",
			What:  "a worker that lost a key finishes it, with its effect",
			Check: "doubled", Fits: all(service, with("freeze")),
		},
		{
			Name: "call-key-of-flow-attempt", File: "dedup/idempotency/flow.go",
			Old:   `return s.Key.ChildID(s.phase)`,
			New:   `return s.Key.ChildID(s.phase + strconv.Itoa(s.Attempt))`,
			What:  "the key of a flow's call differs at a retry",
			Check: "doubled", Fits: service,
		},
		{
			Name: "finished-key-is-claimed", File: "dedup/idempotency/queries_work.go",
			Old:   `ON CONFLICT DO NOTHING RETURNING attempts, set_config('lock_timeout', $6, true) -- of the work`,
			New:   `ON CONFLICT ON CONSTRAINT idempotency_keys_pkey DO UPDATE SET finished_at = NULL, status = NULL RETURNING 1, set_config('lock_timeout', $6, true)`,
			What:  "a request whose key is finished is executed again",
			Check: "doubled", Fits: service,
		},
		{
			Name: "keys-by-their-beginning", File: "dedup/idempotency/queries.go",
			Old:   `AND operation OPERATOR(pg_catalog.=) $2 AND key OPERATOR(pg_catalog.=) $3` + "`\n\n// lookSQL",
			New:   `AND operation OPERATOR(pg_catalog.=) $2 AND left(key::text, 11) = left($3::text, 11)` + "`\n\n// lookSQL",
			What:  "a request gets the answer of another one",
			Check: "lost", Fits: service,
		},
		{
			Name: "answer-behind-the-work", File: "dedup/idempotency/once.go",
			Old: `		store(batch)
	})
	if err != nil {
		return fmt.Errorf("commit %v: %w", key, err)
	}`,
			New: `	})
	if err != nil {
		return fmt.Errorf("commit %v: %w", key, err)
	}
	own := &pgx.Batch{}
	store(own)
	_ = o.pool.SendBatch(ctx, own).Close()`,
			What:  "the answer is stored in another transaction than the work",
			Check: "lost", Fits: service,
		},
	}
}

func service(p torture.Plan) bool { return p.Scene.Service }
