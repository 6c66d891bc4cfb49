// Package demo runs the whole pipeline as separate processes, injects faults, and checks the result
// with a checker that shares no code with the engine.
//
//	report, err := demo.Run(ctx, demo.Options{
//		Command:     []string{"outbox-relay", "demo-process"}, // calls RunProcess
//		DatabaseURL: databaseURL,
//		Brokers:     brokers,
//	})
//	...
//	fmt.Println(report.Held(), report.Lost, report.Doubled, report.Kills)
//
// A shop writes orders and, in the same transaction, an event for each ([outbox]). Two relays carry
// the events to Kafka ([relay]). Three consumers add each order to its customer's balance and write
// a row of effect, without any constraint that would hide a second one ([consumer]). Each of these
// is a separate process. It is repeatedly killed with SIGKILL, or frozen for longer than its lease
// or session and resumed. At the same time, records that were already published are published
// again.
//
// Everything that it creates belongs to one run: a schema, a topic, a consumer group. It uses no
// other table of the database, so it may run beside an application. At the end it removes them.
//
// [outbox]: https://pkg.go.dev/github.com/effectonce/effectonce/outbox
// [relay]: https://pkg.go.dev/github.com/effectonce/effectonce/relay
// [consumer]: https://pkg.go.dev/github.com/effectonce/effectonce/consumer
package demo
