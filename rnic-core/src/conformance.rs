//! The tables of `tests/conformance/requirements.toml`, for tests that walk through them row by
//! row.

use toml::{Table, Value};

const SUITE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/conformance/requirements.toml"));

/// A row of a table.
#[derive(Clone, Debug)]
pub(crate) struct Row(Table);

impl Row {
    /// A text that every row has.
    pub fn text(&self, key: &str) -> &str {
        self.find_text(key).unwrap_or_else(|| panic!("no {key} in {:?}", self.0))
    }

    pub fn find_text(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(Value::as_str)
    }

    /// A number that every row has.
    pub fn number(&self, key: &str) -> u64 {
        self.find_number(key).unwrap_or_else(|| panic!("no {key} in {:?}", self.0))
    }

    pub fn find_number(&self, key: &str) -> Option<u64> {
        self.0.get(key).and_then(Value::as_integer).map(|n| n.try_into().unwrap())
    }

    pub fn find_bool(&self, key: &str) -> Option<bool> {
        self.0.get(key).and_then(Value::as_bool)
    }
}

/// All rows of a table, at least one.
pub(crate) fn table(name: &str) -> Vec<Row> {
    let suite: Table = SUITE.parse().unwrap();
    let rows = suite.get(name).and_then(Value::as_array).unwrap_or_else(|| panic!("no {name}"));
    let row = |row: &Value| Row(row.as_table().unwrap().clone());
    let rows: Vec<Row> = rows.iter().map(row).collect();
    assert!(!rows.is_empty(), "{name} has no rows");
    rows
}

/// The value of a row of the table `limit`.
pub(crate) fn limit(name: &str) -> usize {
    let row = table("limit").into_iter().find(|row| row.text("name") == name);
    let row = row.unwrap_or_else(|| panic!("no limit {name:?}"));
    usize::try_from(row.number("value")).unwrap()
}
