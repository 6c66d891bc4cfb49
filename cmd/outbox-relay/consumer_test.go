package main_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/effectonce/effectonce/internal/kafkatest"
	"github.com/effectonce/effectonce/internal/pgtest"
)

// consumersSQL is a group that works on one topic, and halted in one of two partitions.
const consumersSQL = `
INSERT INTO effectonce.consumers (name, consumer_group, topics, dedup_window) VALUES ('billing/orders', 'billing', '{orders}', '7 days');
INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset, owner, released, trouble) VALUES
  ('billing', 'orders', 0, 7, 'host-1', true, NULL), ('billing', 'orders', 1, 40, 'host-1', false, E'offset out of range\nsecond line')`

// Property: status, positions, doctor and actions show a pause until it ends; pausing or resuming
// twice is reported.
func TestTopicsArePausedForAGroup(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), consumersSQL)
	pause := []string{"consumer", "pause", "--group", "billing", "--topic", "orders", "--why", "INC-12", "--by", "ana"}
	assert.Equal(t, "topic orders is paused for group billing\n", runOn(t, address, pause...).stdout)
	assert.Regexp(t, `^topic orders was paused already: for group billing since \S+Z by ana: INC-12\n$`, runOn(t, address, pause...).stdout)
	v := runOn(t, address, append(pause, "--json")...).object(t)
	assert.Equal(t, false, v["paused"])
	assert.Equal(t, "ana", v["pause"].(map[string]any)["who"])

	assert.Regexp(t, `(?m)^note: topic orders is paused for group billing since \S+ by ana \(INC-12\): to end the pause, run "outbox-relay consumer resume --group billing --topic orders"$`,
		runOn(t, address, "status", "--interval", "0s").stdout)
	positions := runOn(t, address, "positions")
	assert.Zero(t, positions.code)
	assert.Regexp(t, `(?m)^billing +orders/0 +7 .* pause +-$`, positions.stdout)
	assert.Regexp(t, `(?m)^topic orders is paused for group billing since \S+ by ana: INC-12$`, positions.stdout)
	assert.Contains(t, runOn(t, address, "doctor").stdout, "warn  consuming: topic orders is paused for group billing")

	resume := []string{"consumer", "resume", "--group", "billing", "--topic", "orders", "--by", "bob"}
	assert.Equal(t, "topic orders is resumed for group billing\n", runOn(t, address, resume...).stdout)
	assert.Equal(t, "topic orders was not paused for group billing\n", runOn(t, address, resume...).stdout)
	assert.Equal(t, map[string]any{"resumed": false, "group": "billing", "topic": "orders"}, runOn(t, address, append(resume, "--json")...).object(t))
	assert.NotContains(t, runOn(t, address, "positions").stdout, "pause")
	actions := runOn(t, address, "actions", "list").stdout
	assert.Regexp(t, `\(ana\) +consumer\.pause +orders of group billing +INC-12`, actions)
	assert.Regexp(t, `\(bob\) +consumer\.resume +orders of group billing +by hand`, actions)
	assert.Equal(t, 2, strings.Count(actions, "consumer."))
}

// Property: an order to resume at another offset says what it skips or repeats, with --dry-run and
// without; it is shown until it is carried out, and can be canceled.
func TestPartitionIsOrderedToResumeElsewhere(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, consumersSQL)
	at := func(args ...string) result {
		return runOn(t, address, append([]string{"consumer", "resume-at", "--group", "billing", "--topic", "orders", "--partition", "1", "--by", "ana"}, args...)...)
	}
	orders := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM effectonce.consumer_positions WHERE resume_at IS NOT NULL").Scan(&n))
		return n
	}
	dry := at("--at", "latest", "--dry-run")
	assert.Zero(t, dry.code, dry.stderr)
	assert.Equal(t, "orders/1 of group billing would resume at latest: host-1, or the next holder, carries it out\n"+
		"the partition does not move: offset out of range…\n"+
		"MIND: messages from the position, 40, to the end of the partition: they are skipped and have no effect, unless the group is rewound behind them\n", dry.stdout)
	assert.Zero(t, orders())

	assert.Contains(t, at("--at", "50", "--why", "INC-12").stdout, "MIND: 10 offsets, from the position, 40, to 49: they are skipped")
	v := at("--at", "earliest", "--why", "INC-12", "--json").object(t)
	assert.Equal(t, []any{40.0, -2.0, 50.0, "host-1", false}, []any{v["position"], v["resume_at"], v["before"], v["holder"], v["dry_run"]})
	assert.Contains(t, v["effect"], "they are delivered again")
	assert.Equal(t, 1, orders())
	assert.Regexp(t, `(?m)^billing +orders/1 +40 .* resume at earliest +offset out of range…$`, runOn(t, address, "positions").stdout)
	assert.Contains(t, runOn(t, address, "status", "--interval", "0s").stdout,
		"note: orders/1 of group billing is ordered to resume at earliest, which is not carried out yet (position 40, holder host-1)\n")
	doctor := runOn(t, address, "doctor").stdout
	assert.Contains(t, doctor, "warn  consuming: orders/1 of group billing is ordered to resume at earliest")
	assert.Contains(t, doctor, "fail  consuming: orders/1 of consumer billing/orders does not move")

	assert.Equal(t, "orders/1 of group billing: the order is canceled\n", at("--cancel", "--why", "wrong").stdout)
	assert.Equal(t, "orders/1 of group billing: no order is pending\n", at("--cancel", "--why", "wrong").stdout)
	assert.Zero(t, orders())
	assert.Regexp(t, `\(ana\) +consumer\.resume_at +orders/1 of group billing +INC-12`, runOn(t, address, "actions", "list").stdout)
}

// Property: with brokers, an offset that the partition does not have is refused, and the order
// shows exact numbers.
func TestOrderIsComparedWithTheTopic(t *testing.T) {
	t.Parallel()
	address, topic := published(t)
	execSQL(t, connect(t, address), "INSERT INTO effectonce.consumer_positions (consumer_group, topic, partition, next_offset) VALUES ('billing', $1, 0, 1)", topic)
	at := func(at string) result {
		return runKafka(t, address, "consumer", "resume-at", "--group", "billing", "--topic", topic, "--partition", "0", "--at", at, "--why", "INC-12")
	}
	beyond := at("1000")
	assert.Equal(t, 1, beyond.code)
	assert.Contains(t, beyond.stderr, "offset 1000 is behind the end of the partition")
	assert.Regexp(t, `MIND: \d+ offsets, from the position, 1, to \d+: they are skipped`, at("latest").stdout)
	assert.Contains(t, at("earliest").stdout, "MIND: 1 offsets, from 0 to 0: they are delivered again")
}

// Property: the rule for IDs is shown, of one consumer or of all; a change warns of its
// consequences and requires a reason.
func TestRuleForIDsIsSwitched(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	none := runOn(t, address, "consumer", "id-rule")
	assert.Equal(t, result{0, "no consumers: none has registered yet\n", ""}, none)
	execSQL(t, connect(t, address), consumersSQL)
	assert.Regexp(t, `(?m)^billing/orders +legacy$`, runOn(t, address, "consumer", "id-rule").stdout)
	assert.Equal(t, "legacy", runOn(t, address, "consumer", "id-rule", "billing/orders", "--json").object(t)["id_rule"])
	assert.Contains(t, runOn(t, address, "doctor").stdout, "warn  consuming: consumer billing/orders uses the legacy rule for IDs")

	set := runOn(t, address, "consumer", "id-rule", "billing/orders", "--set", "headers:order-id,event-id", "--why", "producers changed", "--by", "ana")
	assert.Zero(t, set.code, set.stderr)
	for _, text := range []string{"from its next start on, the rule is headers:order-id,event-id (before: legacy)", "MIND: Restart all replicas", "do not rewind the group past this moment"} {
		assert.Contains(t, set.stdout, text)
	}
	v := runOn(t, address, "consumer", "id-rule", "billing/orders", "--set", "standard", "--why", "w", "--json").object(t)
	assert.Equal(t, []any{"standard", "headers:order-id,event-id", true}, []any{v["id_rule"], v["before"], v["changed"]})
	assert.Contains(t, v["warning"], "Restart all replicas")
	assert.Contains(t, runOn(t, address, "consumer", "id-rule", "billing/orders", "--set", "standard", "--why", "w").stdout, "has the rule standard already")
	assert.NotContains(t, runOn(t, address, "doctor").stdout, "legacy rule")
	assert.Regexp(t, `\(ana\) +consumer\.id_rule +billing/orders +producers changed`, runOn(t, address, "actions", "list").stdout)
}

// Property: all missing parts of an order are reported at once, and nothing that decides what is
// lost is read from the environment; the error for an unknown name lists the known ones.
func TestOrdersToConsumersAreChecked(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	conn := connect(t, address)
	execSQL(t, conn, consumersSQL)
	environment := map[string]string{
		"DATABASE_URL": address, "OUTBOX_GROUP": "billing", "OUTBOX_TOPIC": "orders", "OUTBOX_WHY": "w", "OUTBOX_AT": "latest", "OUTBOX_PARTITION": "0", "OUTBOX_SET": "standard",
	}
	for line, text := range map[string]string{
		"pause":                                    "--group is missing",
		"pause --group billing":                    "--topic is missing",
		"pause --group billing --topic orders":     "--why is missing",
		"resume --topic orders":                    "--group is missing",
		"resume-at --group billing --topic orders": "--partition is missing",
		"resume-at --group billing --topic orders --partition 0 --why w":                    "give --at",
		"resume-at --group billing --topic orders --partition 0 --at 7":                     "--why is missing",
		"resume-at --group billing --topic orders --partition 0 --at 7 --cancel --why w":    "or else --cancel",
		"resume-at --group billing --topic orders --partition 0 --cancel --dry-run --why w": "--dry-run is for --at",
		"resume-at --group billing --topic orders --partition -1 --at 7 --why w":            "want a number",
		"resume-at --group billing --topic orders --partition 0 --at end --why w":           "want earliest, latest or an offset",
		"resume-at --group billing --topic orders --partition 0 --at -1 --why w":            "want earliest, latest or an offset",
		"id-rule billing/orders --set standard":                                             "--why is missing",
		"id-rule billing/orders --set best --why w":                                         "want legacy, standard,",
		"id-rule --set standard --why w":                                                    "--set needs the name of a consumer",
	} {
		r := run(t, environment, append([]string{"consumer"}, strings.Fields(line)...)...)
		assert.Equal(t, 2, r.code, line)
		assert.Contains(t, r.stderr, text, line)
	}
	for line, text := range map[string]string{
		"pause --group biling --topic orders --why w":                           `group "biling" is unknown: there is "billing"`,
		"resume --group billing --topic odrers":                                 `topic "odrers" of group billing is unknown: there is "orders"`,
		"resume-at --group billing --topic orders --partition 9 --at 7 --why w": `there is "0", "1"`,
		"id-rule billing/odrers":                                                `there is "billing/orders"`,
		"id-rule billing/odrers --set standard --why w":                         `there is "billing/orders"`,
	} {
		r := run(t, environment, append([]string{"consumer"}, strings.Fields(line)...)...)
		assert.Equal(t, 1, r.code, line)
		assert.Contains(t, r.stderr, text, line)
	}
	var changed int
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM effectonce.operator_actions) + (SELECT count(*) FROM effectonce.consumer_pauses)
		+ (SELECT count(*) FROM effectonce.consumer_positions WHERE resume_at IS NOT NULL)`).Scan(&changed))
	assert.Zero(t, changed)
}

// Property: status and positions name a topic that does not exist, and still show everything else.
func TestMisspeltTopicIsShown(t *testing.T) {
	t.Parallel()
	address, misspelt := pgtest.Database(t), kafkatest.UnusedTopic(t)
	execSQL(t, connect(t, address), "INSERT INTO effectonce.consumers (name, consumer_group, topics) VALUES ('billing', 'billing', ARRAY[$1])", misspelt)
	status := runKafka(t, address, "status", "--interval", "0s")
	assert.Zero(t, status.code, status.stderr)
	assert.Contains(t, status.stdout, `note: consumer "billing": topic `+misspelt+" does not exist: is its name misspelt?\n")
	positions := runKafka(t, address, "positions", "--group", "billing")
	assert.Zero(t, positions.code, positions.stderr)
	assert.Contains(t, positions.stdout, "topic "+misspelt+" of consumer billing does not exist")
	v := runKafka(t, address, "positions", "--json").object(t)
	assert.Equal(t, []any{map[string]any{"consumer": "billing", "group": "billing", "topic": misspelt}}, v["missing_topics"])
	assert.Equal(t, 1, runKafka(t, address, "positions", "--group", "other").code)
	assert.Contains(t, runKafka(t, address, "doctor").stdout, "warn  consumer billing: topic "+misspelt+" does not exist")
}

// Property: the operator's role can give each order; the roles of a publisher, a relay and a
// consumer can give none. Row S7 of guarantees.md.
func TestOrdersToConsumersAreAnOperators(t *testing.T) {
	t.Parallel()
	address := pgtest.Database(t)
	execSQL(t, connect(t, address), consumersSQL)
	prefix := withRoles(t, address)
	for part, code := range map[string]int{"publisher": 1, "relay": 1, "operator": 0} {
		login := pgtest.Login(t, address, prefix, part)
		for _, line := range []string{
			"pause --group billing --topic orders --why w", "resume --group billing --topic orders", "id-rule billing/orders --set standard --why w",
			"resume-at --group billing --topic orders --partition 1 --at 41 --why w", "resume-at --group billing --topic orders --partition 1 --cancel --why w",
		} {
			r := runOn(t, login, append([]string{"consumer"}, strings.Fields(line)...)...)
			assert.Equal(t, code, r.code, part+" "+line+r.stderr)
			assert.Equal(t, code != 0, strings.Contains(r.stderr, "42501"), part+" "+line+r.stderr)
		}
	}
	consumer := runOn(t, pgtest.Login(t, address, prefix, "consumer"), "consumer", "pause", "--group", "billing", "--topic", "orders", "--why", "w")
	assert.Contains(t, consumer.stderr, "42501")
}
