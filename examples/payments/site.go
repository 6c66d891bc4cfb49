package main

import (
	"cmp"
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/effectonce/effectonce/consumer"
	"github.com/effectonce/effectonce/examples/startup"
	"github.com/effectonce/effectonce/relay"
)

// site is the environment of the example, with a payment provider and a bank.
type site struct {
	*startup.Site
	provider *provider
	bank     *bank
}

// schema is this program's own: DATABASE_URL may name a database that is in use.
const schema = "effectonce_payments"

// tables are shared by the sites of a database.
const tables = `
CREATE TABLE IF NOT EXISTS effectonce_payments.orders (id uuid PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL, state text NOT NULL, charge text);
CREATE TABLE IF NOT EXISTS effectonce_payments.receipts (customer text NOT NULL, cents bigint NOT NULL)`

// openSite connects to the database of the URL, or starts one if the URL is empty.
func openSite(ctx context.Context, databaseURL string) (_ *site, err error) {
	s := &site{}
	if s.Site, err = startup.Open(ctx, "payments", databaseURL, tables, 3); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.close(ctx)
		}
	}()
	if s.provider, err = startProvider(ctx); err != nil {
		return nil, err
	}
	s.bank, err = startBank(ctx)
	return s, err
}

// start runs the relay and the consumer of receipts until ctx ends. Usually they are separate
// programs.
func (s *site) start(ctx context.Context) (wait func() error, err error) {
	r, err := relay.New(s.Pool, s.Kafka(), relay.Config{Schema: schema})
	if err != nil {
		return nil, err
	}
	c, err := consumer.New(s.Pool, s.Kafka(), consumer.JSON(sendReceipt), consumer.Config{
		Schema: schema, Group: "receipts-" + s.Topic, Topics: []string{s.Topic},
	})
	if err != nil {
		return nil, err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return r.Run(ctx) })
	group.Go(func() error { return c.Run(ctx) })
	return group.Wait, nil
}

// customerOf returns a customer name that is unique even if the database is used again.
func (s *site) customerOf(death string) string {
	return cmp.Or(death, "nobody") + "@" + s.Topic + ".example.com"
}

func (s *site) close(ctx context.Context) {
	if s.provider != nil {
		_ = s.provider.server.Close()
	}
	if s.bank != nil {
		_ = s.bank.server.Close()
	}
	s.Close(ctx)
}
