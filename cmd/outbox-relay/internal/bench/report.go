package bench

import (
	"fmt"
	"io"
	"math"
	"text/tabwriter"
	"time"
)

// Where is what a benchmark ran on and how long it took.
type Where struct {
	Postgres string  `json:"postgres,omitempty"`
	Kafka    string  `json:"kafka,omitempty"`
	Seconds  float64 `json:"seconds,omitempty"` // including the start of the servers
	// Notes are the reasons why the figures mean little, if there are any.
	Notes []string `json:"notes,omitempty"`
}

// tooSmall adds a note if something is measured with too little input for its figures to mean
// something.
func (w *Where) tooSmall(what string, have, telling, rounds int) {
	switch {
	case have < telling:
		w.Notes = append(w.Notes, fmt.Sprintf("%d %s are too few: rates and ratios of such a run are noise; use --%s %d or more", have, what, what, telling))
	case rounds < RoundsDefault:
		w.Notes = append(w.Notes, fmt.Sprintf("--rounds %d is too few for medians: use %d or more", rounds, RoundsDefault))
	}
}

func (w *Where) writeNotes(t *table) {
	for _, note := range w.Notes {
		t.line("note: %s", note)
	}
}

// SetServers adds descriptions of the servers.
func (w *Where) SetServers(postgres, kafka string, took time.Duration) {
	w.Postgres, w.Kafka, w.Seconds = postgres, kafka, math.Round(took.Seconds()*10)/10
}

// ConsumeReport is the result of Consume: messages per second, medians of the rounds. A key that
// could not be measured is left out.
type ConsumeReport struct {
	Textbook      *float64 `json:"textbook,omitempty"`       // one message per transaction, sequentially
	Statement     *float64 `json:"statement,omitempty"`      // one statement per message, waited for
	ByID          *float64 `json:"by_id,omitempty"`          // the effects of a batch in one round trip
	NoDedup       *float64 `json:"no_dedup,omitempty"`       // the same without the claim
	AllDuplicates *float64 `json:"all_duplicates,omitempty"` // every message was claimed before

	TextbookParallel *float64 `json:"textbook_parallel,omitempty"` // the textbook, a goroutine for each partition
	Watermill        *float64 `json:"watermill,omitempty"`         // the same transaction in Watermill's router
	HandLoop         *float64 `json:"hand_loop,omitempty"`         // the engine's statements by hand
	ByPosition       *float64 `json:"by_position,omitempty"`       // no row for a message
	BatchCopy        *float64 `json:"batch_copy,omitempty"`        // a handler of whole batches, COPY
	ParkedKey        *float64 `json:"parked_key,omitempty"`        // by_id while a key is held

	StatementVsTextbook *float64 `json:"statement_vs_textbook,omitempty"`
	ByIDVsTextbook      *float64 `json:"by_id_vs_textbook,omitempty"`
	ByIDVsNoDedup       *float64 `json:"by_id_vs_no_dedup,omitempty"`

	ByIDVsTextbookParallel *float64 `json:"by_id_vs_textbook_parallel,omitempty"`
	ByIDVsWatermill        *float64 `json:"by_id_vs_watermill,omitempty"`
	ByIDVsHandLoop         *float64 `json:"by_id_vs_hand_loop,omitempty"`
	ByPositionVsNoDedup    *float64 `json:"by_position_vs_no_dedup,omitempty"`
	ParkedKeyVsByID        *float64 `json:"parked_key_vs_by_id,omitempty"`
	AllDuplicatesVsByID    *float64 `json:"all_duplicates_vs_by_id,omitempty"`

	// What a claim takes: table and index, and write-ahead log, for one stream of messages, and for
	// all partitions at the same time.
	BytesPerMessage               *float64 `json:"bytes_per_message,omitempty"`
	WALBytesPerMessage            *float64 `json:"wal_bytes_per_message,omitempty"`
	BytesPerMessageInterleaved    *float64 `json:"bytes_per_message_interleaved,omitempty"`
	WALBytesPerMessageInterleaved *float64 `json:"wal_bytes_per_message_interleaved,omitempty"`

	// How much longer a claim takes with Preload rows in the table than with none.
	DedupCostUUID7  *float64 `json:"dedup_cost_uuid7,omitempty"`
	DedupCostRandom *float64 `json:"dedup_cost_random,omitempty"`
	Preload         int      `json:"preload,omitempty"`

	// The times on which the ratios depend: the textbook pays four round trips and a commit for
	// each message.
	RoundTrip *float64 `json:"round_trip_us,omitempty"`
	Commit    *float64 `json:"commit_us,omitempty"`

	Messages   int `json:"messages"`
	Partitions int `json:"partitions"`
	Rounds     int `json:"rounds"`

	Where
}

func newConsumeReport(opts ConsumeOptions, s samples) *ConsumeReport {
	r := &ConsumeReport{
		Textbook: rounded(s.median("textbook"), 0), Statement: rounded(s.median("statement"), 0),
		ByID: rounded(s.median("by_id"), 0), NoDedup: rounded(s.median("no_dedup"), 0),
		AllDuplicates:      rounded(s.median("all_duplicates"), 0),
		BytesPerMessage:    rounded(s.median("bytes_per_message"), 0),
		WALBytesPerMessage: rounded(s.median("wal_bytes_per_message"), 0),
		RoundTrip:          rounded(s.median("round_trip_us"), 0), Commit: rounded(s.median("commit_us"), 0),
		Messages: opts.Messages, Partitions: opts.Partitions, Rounds: opts.Rounds,
	}
	r.DedupCostUUID7, r.DedupCostRandom = rounded(s.median("dedup_cost_uuid7"), 2), rounded(s.median("dedup_cost_random"), 2)
	r.Preload = opts.Preload
	r.BytesPerMessageInterleaved = rounded(s.median("bytes_per_message_interleaved"), 0)
	r.WALBytesPerMessageInterleaved = rounded(s.median("wal_bytes_per_message_interleaved"), 0)
	r.TextbookParallel, r.Watermill = rounded(s.median("textbook_parallel"), 0), rounded(s.median("watermill"), 0)
	r.HandLoop, r.ByPosition = rounded(s.median("hand_loop"), 0), rounded(s.median("by_position"), 0)
	r.BatchCopy, r.ParkedKey = rounded(s.median("batch_copy"), 0), rounded(s.median("parked_key"), 0)
	r.ByIDVsTextbookParallel, r.ByIDVsWatermill = ratio(r.ByID, r.TextbookParallel), ratio(r.ByID, r.Watermill)
	r.ByIDVsHandLoop, r.ByPositionVsNoDedup = ratio(r.ByID, r.HandLoop), ratio(r.ByPosition, r.NoDedup)
	r.ParkedKeyVsByID, r.AllDuplicatesVsByID = ratio(r.ParkedKey, r.ByID), ratio(r.AllDuplicates, r.ByID)
	r.StatementVsTextbook = ratio(r.Statement, r.Textbook)
	r.ByIDVsTextbook = ratio(r.ByID, r.Textbook)
	r.ByIDVsNoDedup = ratio(r.ByID, r.NoDedup)
	r.tooSmall("messages", opts.Messages, messagesTelling, opts.Rounds)
	return r
}

// WriteTable writes the report for people.
func (r *ConsumeReport) WriteTable(w io.Writer) error {
	t := newTable(w, "handler", "messages/s", "against the textbook")
	t.row("textbook: one message per transaction", r.Textbook, ratio(r.Textbook, r.Textbook))
	t.row("textbook, a goroutine for each partition", r.TextbookParallel, ratio(r.TextbookParallel, r.Textbook))
	t.row("Watermill, the textbook's transaction", r.Watermill, ratio(r.Watermill, r.Textbook))
	t.row("engine, one statement per message", r.Statement, r.StatementVsTextbook)
	t.row("engine, statements queued", r.ByID, r.ByIDVsTextbook)
	t.row("engine, queued, without dedup", r.NoDedup, ratio(r.NoDedup, r.Textbook))
	t.row("engine, queued, all duplicates", r.AllDuplicates, ratio(r.AllDuplicates, r.Textbook))
	t.row("engine, queued, a key is held", r.ParkedKey, ratio(r.ParkedKey, r.Textbook))
	t.row("engine, queued, by position", r.ByPosition, ratio(r.ByPosition, r.Textbook))
	t.row("engine, whole batches by COPY", r.BatchCopy, ratio(r.BatchCopy, r.Textbook))
	t.row("the engine's statements by hand", r.HandLoop, ratio(r.HandLoop, r.Textbook))
	t.line("")
	t.fact("queued against a goroutine for each partition", r.ByIDVsTextbookParallel, "%.1f")
	t.fact("queued against Watermill", r.ByIDVsWatermill, "%.1f")
	t.fact("queued against the loop by hand", r.ByIDVsHandLoop, "%.2f")
	t.fact("by position against without dedup", r.ByPositionVsNoDedup, "%.2f")
	t.fact("with dedup against without", r.ByIDVsNoDedup, "%.2f")
	t.fact("claim, table and index, one stream", r.BytesPerMessage, "%.0f bytes a message")
	t.fact("claim, write-ahead log, one stream", r.WALBytesPerMessage, "%.0f bytes a message")
	t.fact("claim, table and index, all partitions", r.BytesPerMessageInterleaved, "%.0f bytes a message")
	t.fact("claim, write-ahead log, all partitions", r.WALBytesPerMessageInterleaved, "%.0f bytes a message")
	t.fact(fmt.Sprintf("a claim by UUIDv7 at %d rows, against none", r.Preload), r.DedupCostUUID7, "%.2f")
	t.fact(fmt.Sprintf("a claim by random ID at %d rows, against none", r.Preload), r.DedupCostRandom, "%.2f")
	t.fact("this machine: a round trip to the database", r.RoundTrip, "%.0f microseconds")
	t.fact("this machine: a commit", r.Commit, "%.0f microseconds")
	r.writeNotes(t)
	return t.flush()
}

// table formats figures in columns and leaves out what was not measured.
type table struct {
	w   *tabwriter.Writer
	err error
}

func newTable(w io.Writer, columns ...any) *table {
	t := &table{w: tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)}
	t.line("%s\t%s\t%s", columns...)
	return t
}

func (t *table) line(format string, args ...any) {
	if _, err := fmt.Fprintf(t.w, format+"\n", args...); err != nil && t.err == nil {
		t.err = err
	}
}

func (t *table) row(what string, rate, against *float64) {
	if rate != nil && against != nil {
		t.line("%s\t%10.0f\t%19.1fx", what, *rate, *against)
	}
}

func (t *table) fact(what string, value *float64, format string) {
	if value != nil {
		t.line("%s\t"+format, what, *value)
	}
}

func (t *table) flush() error {
	if t.err != nil {
		return t.err
	}
	return t.w.Flush()
}

// rounded removes digits that mean nothing.
func rounded(value *float64, digits int) *float64 {
	if value == nil {
		return nil
	}
	unit := math.Pow10(digits)
	r := math.Round(*value*unit) / unit
	return &r
}

func ratio(a, b *float64) *float64 {
	if a == nil || b == nil || *b == 0 {
		return nil
	}
	r := *a / *b
	return rounded(&r, 2)
}
