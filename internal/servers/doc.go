// Package servers starts the PostgreSQL and the Kafka for tests, demo and benchmarks: the best kind
// that the machine has.
//
//	pg, err := servers.StartPostgres(ctx, servers.PostgresOptions{})
//	if err != nil {
//		return err
//	}
//	defer pg.Stop(context.WithoutCancel(ctx))
//	fmt.Println(pg.Description) // PostgreSQL 18.3 embedded (127.0.0.1:34567)
//
// It tries in this order: the server that DATABASE_URL or KAFKA_BROKERS names; a container, if a
// Docker engine on this machine answers; PostgreSQL from downloaded binaries, and kfake instead of
// Kafka. EMBEDDED_POSTGRES names the major version of the binaries (14 to 18; default 18), and
// EMBEDDED_POSTGRES_PRELOAD a library for them, which makes them the first choice. With
// REQUIRE_CONTAINERS=1 a missing Docker engine is an error instead of the third choice. Everything
// listens on 127.0.0.1 only, and keeps its address when it is killed and restarted.
//
// An embedded PostgreSQL ends with the process that started it, even after SIGKILL. A container
// does so if testcontainers' reaper runs, which TESTCONTAINERS_RYUK_DISABLED turns off.
package servers
