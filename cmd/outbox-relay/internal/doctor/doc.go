// Package doctor looks at a pipeline from the outside, without changing anything: what waits and
// which replica relays it ([ReadStatus]), and what is wrong or soon will be ([Server], [Rights],
// [Topics] and the other checks, each a list of findings with a remedy).
//
//	status, err := doctor.ReadStatus(ctx, conn, schema, doctor.StatusOptions{})
//	...
//	fmt.Println(status.Well, status.Problems)
//
// Every age and every lease is measured by the database's clock.
package doctor
