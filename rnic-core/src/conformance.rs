//! The tables of `tests/conformance/requirements.toml`, for tests that execute them.

use toml::Table;

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/conformance/requirements.toml");

/// The rows of one of its arrays of tables, in their order.
pub(crate) fn rows(name: &str) -> Vec<Table> {
    let text = std::fs::read_to_string(PATH).expect("the file is part of the repository");
    let file: Table = text.parse().expect("TOML");
    let rows = file[name].as_array().expect("an array of tables");
    rows.iter().map(|row| row.as_table().expect("a table").clone()).collect()
}

/// The value of a row of the table `limit`.
pub(crate) fn limit(name: &str) -> usize {
    let row = rows("limit").into_iter().find(|row| row["name"].as_str() == Some(name));
    let value = row.and_then(|row| row["value"].as_integer());
    usize::try_from(value.unwrap_or_else(|| panic!("no limit {name:?}"))).expect("not negative")
}
