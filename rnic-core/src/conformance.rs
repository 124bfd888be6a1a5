//! Tables of `tests/conformance/requirements.toml`, for tests that check every row.

use toml::{Table, Value};

const SUITE: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/conformance/requirements.toml"));

/// A row of a table.
#[derive(Clone, Debug)]
pub(crate) struct Row(Table);

impl Row {
    /// Returns the string with this key; panics if the row has none.
    pub fn text(&self, key: &str) -> &str {
        self.find_text(key).unwrap_or_else(|| panic!("no {key} in {:?}", self.0))
    }

    pub fn find_text(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(Value::as_str)
    }

    /// Returns the number with this key; panics if the row has none.
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

/// Returns all rows of a table; panics if it is empty.
pub(crate) fn table(name: &str) -> Vec<Row> {
    let suite: Table = SUITE.parse().unwrap();
    let rows = suite.get(name).and_then(Value::as_array).unwrap_or_else(|| panic!("no {name}"));
    let row = |row: &Value| Row(row.as_table().unwrap().clone());
    let rows: Vec<Row> = rows.iter().map(row).collect();
    assert!(!rows.is_empty(), "{name} has no rows");
    rows
}

/// Returns the value in the row `name` of the table `limit`.
pub(crate) fn limit(name: &str) -> usize {
    let row = table("limit").into_iter().find(|row| row.text("name") == name);
    let row = row.unwrap_or_else(|| panic!("no limit {name:?}"));
    usize::try_from(row.number("value")).unwrap()
}
