// Payments: an API that takes orders, charges for them at a payment provider, has a receipt sent,
// and pays the seller through a bank without idempotency keys. Each of these happens once, although
// the API is killed in every phase and its client retries.
//
//	go run ./examples/payments
//
// The interesting part is api.go: the phases. The example needs only Go. With DATABASE_URL and
// KAFKA_BROKERS it uses those servers, with its own schema (effectonce_payments), which it creates,
// and its own topic. Provider and bank always run in this process. The API is a separate process,
// so that it can be killed.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"text/tabwriter"

	"golang.org/x/sync/errgroup"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	work := func(ctx context.Context) error { return run(ctx, os.Stdout, os.Getenv("DATABASE_URL")) }
	if os.Getenv(envDatabase) != "" {
		work = serve // this process is a child that run started
	}
	if err := work(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "payments:", err)
		os.Exit(1)
	}
}

// deaths are the points at which the API is killed, and what is durable then. In the first case it
// is not killed.
func deaths() []struct{ at, text string } {
	return []struct{ at, text string }{
		{"", "never"},
		{atRequest, "before the key was claimed"},
		{atReserve, "the order was written, not committed"},
		{atCharge, "the order was committed, the provider not asked"},
		{atCharged, "the provider had charged, the API had not noted it"},
		{atBook, "order and receipt were written, not committed"},
		{atTransfer, "order and receipt were committed, the bank not asked"},
		{atTransferred, "the bank had paid, the API had not noted it"},
		{atAnswer, "all was committed, the client had no response"},
	}
}

// run places one order for each death, and shows the results.
func run(ctx context.Context, out io.Writer, databaseURL string) error {
	s, err := openSite(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	working, stop := context.WithCancel(ctx)
	defer stop()
	wait, err := s.start(working)
	if err != nil {
		return err
	}
	orders := make([]outcome, len(deaths()))
	group, asking := errgroup.WithContext(ctx)
	group.SetLimit(3)
	for i, death := range deaths() {
		group.Go(func() (err error) {
			orders[i], err = s.order(asking, death.at)
			return err
		})
	}
	if err = group.Wait(); err == nil {
		err = s.Handled(ctx, len(orders))
	}
	if err == nil {
		err = s.report(ctx, out, orders)
	}
	stop()
	if stopErr := wait(); err == nil {
		err = stopErr
	}
	return err
}

// report counts by customer: each death has its own customer.
func (s *site) report(ctx context.Context, out io.Writer, orders []outcome) error {
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, "THE API WAS KILLED WHEN\tTIMES\tREQUESTS\tSTATUS\tPROVIDER ASKED\tCHARGES\tTRANSFERS\tORDERS\tRECEIPTS")
	wrong := 0
	for i, death := range deaths() {
		customer := s.customerOf(death.at)
		var booked, receipts int
		if err := s.Pool.QueryRow(ctx, countSQL, customer).Scan(&booked, &receipts); err != nil {
			return fmt.Errorf("count: %w", err)
		}
		asked, charges := s.provider.count(customer)
		transfers := s.bank.count(customer)
		if charges != 1 || transfers != 1 || booked != 1 || receipts != 1 {
			wrong++
		}
		o := orders[i]
		_, _ = fmt.Fprintf(table, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", death.text, o.killed, o.requests, o.status, asked, charges, transfers, booked, receipts)
	}
	_, _ = fmt.Fprintf(out, "%s\n\n", s.Servers)
	if err := table.Flush(); err != nil {
		return err
	}
	if wrong > 0 {
		return fmt.Errorf("%d orders do not have one charge, one transfer and one receipt", wrong)
	}
	_, err := fmt.Fprintf(out, "\n%d orders, one charge, one transfer and one receipt each\n", len(orders))
	return err
}

const countSQL = `SELECT (SELECT count(*) FROM effectonce_payments.orders WHERE customer = $1 AND state = 'paid'), (SELECT count(*) FROM effectonce_payments.receipts WHERE customer = $1)`
