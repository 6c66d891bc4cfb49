package migrations

// WithNext returns options under which All has one more migration, as a next release will have.
func (o Options) WithNext(up, down string) Options {
	o.next = &Migration{Name: "next", Up: "SET search_path = pg_catalog, pg_temp;\n" + up, Down: "SET search_path = pg_catalog, pg_temp;\n" + down}
	return o
}
