package torture

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/fleet"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/judge"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/scene"
	"github.com/effectonce/effectonce/cmd/outbox-relay/internal/torture/worker"
)

// Comparison is what one system did in the rounds that all systems played.
type Comparison struct {
	System string `json:"system"`
	Rounds int    `json:"rounds"`
	Faults int    `json:"faults"`
	// Unfinished rounds did not drain in time: what is missing then counts as lost.
	Unfinished int `json:"unfinished"`
	judge.Verdict

	// Medians of the rounds.
	LostPerMillion       float64 `json:"lost_per_million"`
	DoubledPerMillion    float64 `json:"doubled_per_million"`
	OutOfOrderPerMillion float64 `json:"out_of_order_per_million"`
	LostPer100Faults     float64 `json:"lost_per_100_faults"`
	DoubledPer100Faults  float64 `json:"doubled_per_100_faults"`
	OutOfOrderPer100     float64 `json:"out_of_order_per_100_faults"`
	MessagesPerSecond    float64 `json:"messages_per_second"` // from the first effects until the last one
}

// Compared is the result of Compare.
type Compared struct {
	Environment string              `json:"environment"`
	Systems     []Comparison        `json:"systems"`
	Rivals      []scene.Description `json:"rivals,omitempty"` // of the rivals' program
}

// contestants in the order in which they play each round; "" is this engine.
func (t *run) contestants(more []scene.Description) []string {
	names := []string{"", scene.RivalTextbook, scene.RivalNaive}
	for _, d := range more {
		if d.Missing == "" {
			names = append(names, d.Name)
		}
	}
	return names
}

// Compare plays the same plans with this engine and with each rival, one after the other, until the
// time is over and every system has played every round that was begun.
func Compare(ctx context.Context, options Options) (all Compared, err error) {
	if err := fleet.Supported(); err != nil {
		return all, err
	}
	t := &run{Options: options, rivals: map[string]scene.Description{}}
	if all.Rivals, err = t.describe(ctx); err != nil {
		return all, err
	}
	a, err := openArena(ctx, options.Embedded, options.Offset, max(1, options.Brokers))
	if err != nil {
		return all, err
	}
	defer func() { err = errors.Join(err, a.close(ctx)) }()
	all.Environment = a.environment()
	if err := t.leaveOut(all.Rivals, a); err != nil {
		return all, err
	}
	results, contestants := map[string][]Result{}, t.contestants(all.Rivals)
	begun := time.Now()
	for n := 1; n == 1 || t.more(n-1, begun); n++ {
		p := Draw(t.Seed, n, t.Seconds, t.Rate, t.Pace, a.abilities())
		for _, rival := range contestants {
			mine := p.For(rival)
			if d := t.rivals[rival]; d.RelaysMax > 0 {
				mine.Scene.Relay.Replicas = min(mine.Scene.Relay.Replicas, d.RelaysMax)
			}
			result, err := t.play(ctx, a, mine)
			if err != nil {
				return all, fmt.Errorf("round %d of %s, whose logs are in %s: %w", n, named(rival), result.Logs, err)
			}
			results[rival] = append(results[rival], result)
		}
	}
	for _, rival := range contestants {
		all.Systems = append(all.Systems, compared(named(rival), results[rival]))
	}
	return all, nil
}

// describe asks the rivals' program which rivals it has.
func (t *run) describe(ctx context.Context) (all []scene.Description, err error) {
	if t.RivalProgram == "" {
		_, err := fmt.Fprintln(t.Out, "left out: Watermill and Debezium, because no program with rivals is named")
		return nil, err
	}
	output, err := exec.CommandContext(ctx, t.RivalProgram, "describe").Output() //nolint:gosec // what its user names
	if err == nil {
		err = json.Unmarshal(output, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("ask %s for its rivals: %w", t.RivalProgram, err)
	}
	for _, d := range all {
		t.rivals[d.Name] = d
	}
	return all, nil
}

// leaveOut says which rivals cannot play on these servers.
func (t *run) leaveOut(all []scene.Description, a *arena) error {
	for i := range all {
		d := &all[i]
		if d.RealKafka && a.kafka.Fake != nil && d.Missing == "" {
			d.Missing = "Kafka Connect does not start on kfake, the embedded Kafka"
		}
		if d.Missing == "" {
			continue
		}
		if _, err := fmt.Fprintf(t.Out, "left out: %s, because %s\n", d.Name, d.Missing); err != nil {
			return err
		}
	}
	return nil
}

// missingOfRival counts each order and each child that has no effect: doubled effects would hide what
// is still on its way, and what waits in a foreign relay is not known.
func (r *round) missingOfRival(ctx context.Context) (all int64, err error) {
	for _, g := range r.plan.Scene.Groups {
		var missing int64
		if err := r.pool.QueryRow(ctx, rivalMissingSQL, g.Number, g.Parent, scene.ChildEvery).Scan(&missing); err != nil {
			return 0, err
		}
		all += missing
	}
	return all, nil
}

const rivalMissingSQL = `-- torture.rival_missing
SELECT count(*) FROM (
  SELECT id FROM shop.orders WHERE $2::smallint = 0
  UNION SELECT order_id FROM shop.effects WHERE grp = $2 AND order_id % $3 = 0
) AS wanted WHERE NOT EXISTS (SELECT FROM shop.effects AS e WHERE e.grp = $1 AND e.order_id = wanted.id)`

// command starts the processes of a scene.
func (t *run) command(s scene.Scene) []string {
	if _, foreign := t.rivals[s.Rival]; foreign {
		return []string{t.RivalProgram, "process"}
	}
	return t.Command
}

// prepare lets a rival create its tables.
func (t *run) prepare(ctx context.Context, s *site, p Plan, dir string) error {
	if _, foreign := t.rivals[p.Scene.Rival]; !foreign {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	input, err := json.Marshal(worker.Job{Role: worker.RolePrepare, Name: worker.RolePrepare, DatabaseURL: s.databaseURL, Brokers: s.brokers, Topic: s.name, Scene: p.Scene, Ledgers: dir})
	if err != nil {
		return err
	}
	command := t.command(p.Scene)
	cmd := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // what its user names
	stdin, err := cmd.StdinPipe()                               // stays open: the process ends with it
	if err != nil {
		return err
	}
	if _, err := stdin.Write(append(input, '\n')); err != nil { // it fits into the pipe
		return err
	}
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("prepare %s: %w: %s", p.Scene.Rival, err, output)
	}
	return nil
}

func named(rival string) string {
	if rival == "" {
		return "effectonce"
	}
	return rival
}

func compared(system string, results []Result) Comparison {
	c := Comparison{System: system, Rounds: len(results)}
	var lost, doubled, disorder, lostFaults, doubledFaults, disorderFaults, speed []float64
	for _, r := range results {
		faults := 0
		for _, n := range r.Faults {
			faults += n
		}
		c.Faults += faults
		v := r.Verdict
		c.Add(v)
		if v.Stuck > 0 {
			c.Unfinished++
		}
		million, hundred := float64(max(1, v.Messages))/1e6, float64(max(1, faults))/100
		lost, lostFaults = append(lost, float64(v.Lost)/million), append(lostFaults, float64(v.Lost)/hundred)
		doubled, doubledFaults = append(doubled, float64(v.Doubled)/million), append(doubledFaults, float64(v.Doubled)/hundred)
		disorder, disorderFaults = append(disorder, float64(v.OutOfOrder)/million), append(disorderFaults, float64(v.OutOfOrder)/hundred)
		speed = append(speed, float64(v.Messages)/max(1, r.Busy))
	}
	c.Examples = nil // of many rounds; their logs have them
	c.LostPerMillion, c.LostPer100Faults = median(lost), median(lostFaults)
	c.DoubledPerMillion, c.DoubledPer100Faults = median(doubled), median(doubledFaults)
	c.OutOfOrderPerMillion, c.OutOfOrderPer100 = median(disorder), median(disorderFaults)
	c.MessagesPerSecond = median(speed)
	return c
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	slices.Sort(values)
	return (values[(len(values)-1)/2] + values[len(values)/2]) / 2
}

// Table is the comparison in Markdown.
func Table(all []Comparison) string {
	var b strings.Builder
	b.WriteString("| | rounds | unfinished | messages | faults | lost | doubled | out of order | messages per second |\n|---|---|---|---|---|---|---|---|---|\n")
	for _, c := range all {
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %d | %d | %d | %d | %.0f |\n", c.System, c.Rounds, c.Unfinished, c.Messages, c.Faults, c.Lost, c.Doubled, c.OutOfOrder, c.MessagesPerSecond)
	}
	b.WriteString("\nMedians of the rounds, per million messages and per hundred faults:\n\n")
	b.WriteString("| | lost per million | doubled | out of order | lost per 100 faults | doubled | out of order |\n|---|---|---|---|---|---|---|\n")
	for _, c := range all {
		fmt.Fprintf(&b, "| %s | %.0f | %.0f | %.0f | %.1f | %.1f | %.1f |\n", c.System,
			c.LostPerMillion, c.DoubledPerMillion, c.OutOfOrderPerMillion, c.LostPer100Faults, c.DoubledPer100Faults, c.OutOfOrderPer100)
	}
	return b.String()
}

// best is the system with the most messages per second.
func best(all []Comparison) Comparison {
	return slices.MaxFunc(all, func(a, b Comparison) int { return cmp.Compare(a.MessagesPerSecond, b.MessagesPerSecond) })
}

// Page is the comparison as a page of documentation. command made it.
func Page(all Compared, command string) string {
	var b strings.Builder
	b.WriteString(pageHead)
	fmt.Fprintf(&b, "```sh\n%s\n```\n\n%s. \"effectonce\" is this repository's. Highest throughput: %s.\n\n%s", command, all.Environment, best(all.Systems).System, Table(all.Systems))
	b.WriteString(pagePromises)
	for _, d := range all.Rivals {
		text := d.Settings
		if d.Missing != "" {
			text = "Left out: " + d.Missing
		}
		fmt.Fprintf(&b, "- **%s**: %s\n", d.Name, text)
	}
	return b.String()
}

const pageHead = `# Rivals in the same arena

This page is generated by the torture run ([how it works](../torture.md)): the same seed, configurations
and faults for each system, one after the other, and the same judge.

`

const pagePromises = `
How to read it:

- **lost** is an order without its effect, its record or its child. A round ends when nothing has moved for 75 s
  after the last fault; what is missing then counts as lost although it might have come later: such rounds are
  *unfinished*.
- **doubled** is a second effect, or a second child. A second record in a topic is not counted for any rival: all of
  them are at-least-once there, as they say. The nemesis also publishes records again, which a producer that
  retries does; a consumer without claims, or whose memory ends with its process, does not promise to recognise that.
- **out of order** is a record or an effect behind a later one of its key. The textbook's replicas do not promise
  order: with one replica they would keep it. Watermill and Debezium document order within a partition.
- **messages per second** is from the first effects to the last one. Writers stop while consumers are far behind, and
  write no more than the command's rate.
- All play without what only effectonce has: failure policies, operators' commands, idempotency keys,
  messages for later, exactly-once relays, and crash points inside the engine, which strike effectonce alone.
- effectonce draws its shape of handler (each message, batches, queued statements); the others have one transaction
  for each message. So throughput compares the systems as they are used, not the same loop.
- A handful of rounds shows what happens, not how seldom. Zero in a short run is no proof.

Settings:

- **textbook**: replicas drain the outbox with ` + "`FOR UPDATE SKIP LOCKED`" + `, 500 rows at a time; the consumer inserts the
  message's ID in the transaction of the effect, and commits offsets afterwards.
- **naive**: the same without the insert of the ID.
`
