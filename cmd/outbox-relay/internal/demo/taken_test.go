package demo_test

import (
	"cmp"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/demo"
	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/ownschema"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// Property: a schema or a topic that has the name of a run is neither used nor removed, should two
// names ever be the same.
func TestWhatARunDidNotMakeStays(t *testing.T) {
	t.Parallel()
	const name = "effectonce_demo_4711"
	brokers := kafkatest.Brokers(t)
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...))
	require.NoError(t, err)
	defer client.Close()
	admin := kadm.NewClient(client)
	_, err = admin.CreateTopic(t.Context(), 1, -1, nil, name)
	require.NoError(t, err)

	taken := pgtest.EmptyDatabase(t)
	conn := pgtest.Connect(t, taken)
	pgtest.Exec(t, conn, `CREATE SCHEMA effectonce_demo_4711; CREATE TABLE effectonce_demo_4711.orders AS SELECT generate_series(1, 500) AS id`)
	require.ErrorIs(t, demo.SetUpAndTearDown(t.Context(), taken, brokers, name), ownschema.ErrNotOwn)
	var orders, schemas int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM effectonce_demo_4711.orders`).Scan(&orders))
	require.Equal(t, 500, orders)

	free := pgtest.EmptyDatabase(t)
	require.ErrorContains(t, demo.SetUpAndTearDown(t.Context(), free, brokers, name), "create topic "+name)
	require.NoError(t, pgtest.Connect(t, free).QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'effectonce%'`).Scan(&schemas))
	require.Zero(t, schemas)
	// The controller knows at once; brokers may list what is deleted, and not what is created.
	again, err := admin.CreateTopic(t.Context(), 1, -1, nil, name)
	require.ErrorIs(t, cmp.Or(again.Err, err), kerr.TopicAlreadyExists)
}
