package scene

// Schema holds the tables of the workload.
const Schema = "shop"

// TablesSQL creates the tables of the workload. effects has no constraint, so that nothing but the
// claim prevents a second effect.
const TablesSQL = `-- torture.tables
CREATE SCHEMA shop;
CREATE TABLE shop.keys (
  key     int    PRIMARY KEY,
  version bigint NOT NULL DEFAULT 0, -- of the last order; its writers queue at this row
  amount  bigint NOT NULL DEFAULT 0  -- of all orders
) WITH (fillfactor = 50);
CREATE TABLE shop.orders (
  id         bigint PRIMARY KEY,
  message_id uuid   NOT NULL,
  key        int    NOT NULL,
  version    bigint NOT NULL,
  amount     bigint NOT NULL,
  kind       int    NOT NULL,
  request    text
);
CREATE TABLE shop.balances (
  grp     smallint NOT NULL,
  key     int      NOT NULL,
  balance bigint   NOT NULL DEFAULT 0,
  effects bigint   NOT NULL DEFAULT 0,
  PRIMARY KEY (grp, key)
) WITH (fillfactor = 50);
CREATE TABLE shop.effects (
  sequence bigint   GENERATED ALWAYS AS IDENTITY,
  grp      smallint NOT NULL,
  order_id bigint   NOT NULL,
  key      int      NOT NULL,
  version  bigint   NOT NULL,
  amount   bigint   NOT NULL
);
CREATE TABLE shop.journals (
  grp     smallint PRIMARY KEY,
  version bigint   NOT NULL DEFAULT 0 -- of the last entry; handlers queue at this row
) WITH (fillfactor = 50);
CREATE TABLE shop.entries (
  grp      smallint NOT NULL,
  version  bigint   NOT NULL,
  order_id bigint   NOT NULL
);
CREATE TABLE shop.fenced ( -- what fences let through
  sequence bigint   GENERATED ALWAYS AS IDENTITY,
  grp      smallint NOT NULL,
  key      int      NOT NULL,
  version  bigint   NOT NULL
);
CREATE TABLE shop.outbox ( -- of rivals
  id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  message_id uuid   NOT NULL,
  topic      text   NOT NULL,
  key        bytea,
  payload    bytea
);
CREATE TABLE shop.processed ( -- of rivals
  grp        smallint NOT NULL,
  message_id uuid     NOT NULL,
  PRIMARY KEY (message_id, grp)
);
CREATE TABLE shop.resumed ( -- orders to resume elsewhere, as they were carried out
  consumer_group text   NOT NULL,
  topic          text   NOT NULL,
  partition      int    NOT NULL,
  ordered        bigint NOT NULL,
  next           bigint
);
CREATE FUNCTION shop.note_resumed() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = '' AS $do$
BEGIN
  INSERT INTO shop.resumed VALUES (new.consumer_group, new.topic, new.partition, old.resume_at, new.next_offset);
  RETURN NULL;
END
$do$;
CREATE TRIGGER note_resumed AFTER UPDATE ON effectonce.consumer_positions
FOR EACH ROW WHEN (old.resume_at >= 0 AND new.resume_at IS NULL) EXECUTE FUNCTION shop.note_resumed();
CREATE TABLE shop.cured (at timestamptz NOT NULL DEFAULT now());`

// RowsSQL creates the keys, a balance of each for each group, and the groups' journals.
const RowsSQL = `-- torture.rows
WITH made AS (INSERT INTO shop.keys (key) SELECT generate_series(1, $1::int) RETURNING key),
  journals AS (INSERT INTO shop.journals (grp) SELECT unnest($2::smallint[]))
INSERT INTO shop.balances (grp, key) SELECT grp, key FROM made, unnest($2::smallint[]) AS grp`

// LoginsSQL creates a login for each part of the pipeline, with the least rights, and with those on
// the workload's tables. $secret is their password.
const LoginsSQL = `-- torture.logins
DO $do$
DECLARE part text;
BEGIN
  FOREACH part IN ARRAY ARRAY['publisher', 'relay', 'consumer', 'endpoint', 'operator'] LOOP
    IF to_regrole('torture_' || part) IS NULL THEN
      EXECUTE format('CREATE ROLE %I LOGIN IN ROLE %I', 'torture_' || part, 'effectonce_' || part);
    END IF;
    EXECUTE format('ALTER ROLE %I PASSWORD %L', 'torture_' || part, '$secret');
  END LOOP;
END
$do$;
GRANT USAGE ON SCHEMA shop TO torture_publisher, torture_consumer, torture_endpoint, torture_relay;
GRANT SELECT, UPDATE, DELETE ON shop.outbox TO torture_relay; -- as a rival
GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA shop TO torture_publisher, torture_consumer, torture_endpoint;`
