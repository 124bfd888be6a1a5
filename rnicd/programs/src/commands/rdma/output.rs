//! Formats objects as lines or as JSON, as iproute2 does.

use serde::Serialize;
use serde::ser::SerializeMap;
use serde_json::Value;

/// Options of the output.
#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    pub json: bool,
    pub pretty: bool,
    pub details: bool,
}

/// An object with its fields in the order of the output.
#[derive(Clone, Debug, Default)]
pub struct Object(Vec<Field>);

#[derive(Clone, Debug)]
struct Field {
    name: &'static str,
    value: Value,
    /// The field in a line of text; empty if only JSON contains it.
    text: String,
}

impl Object {
    /// Adds a field with its own text.
    pub fn field(mut self, name: &'static str, value: impl Into<Value>, text: String) -> Self {
        self.0.push(Field { name, value: value.into(), text });
        self
    }

    /// Adds a text as `name value`.
    pub fn text(self, name: &'static str, value: &str) -> Self {
        self.field(name, value, format!("{name} {value} "))
    }

    /// Adds a number as `name value`.
    pub fn number(self, name: &'static str, value: u64) -> Self {
        self.field(name, value, format!("{name} {value} "))
    }

    /// Adds a field that only JSON contains.
    pub fn json(self, name: &'static str, value: impl Into<Value>) -> Self {
        self.field(name, value, String::new())
    }

    /// Returns true if each filter names a field and lists its value, regardless of case.
    pub fn matches(&self, filters: &[(&str, &str)]) -> bool {
        filters.iter().all(|(name, values)| {
            self.0.iter().filter(|field| field.name == *name).any(|field| {
                let value = match &field.value {
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                values.split(',').any(|wanted| wanted.eq_ignore_ascii_case(&value))
            })
        })
    }

    fn line(&self) -> String {
        self.0.iter().map(|field| field.text.as_str()).collect()
    }
}

impl Serialize for Object {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for field in &self.0 {
            map.serialize_entry(field.name, &field.value)?;
        }
        map.end()
    }
}

/// Formats objects, each as a line or all as a JSON array.
pub fn format(objects: &[Object], style: &Style) -> String {
    let json = match (style.json, style.pretty) {
        (false, _) => return objects.iter().map(|object| object.line() + "\n").collect(),
        (true, false) => serde_json::to_string(objects),
        (true, true) => serde_json::to_string_pretty(objects),
    };
    // Strings and numbers cannot fail.
    json.unwrap_or_default() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_keep_their_order() {
        let object = Object::default()
            .json("ifindex", 1)
            .field("ifname", "rxe0", "link rxe0/1 ".to_owned())
            .text("state", "ACTIVE")
            .number("pid", 7);
        let objects = [object];
        let line = format(&objects, &Style::default());
        assert_eq!(line, "link rxe0/1 state ACTIVE pid 7 \n");
        let json = format(&objects, &Style { json: true, ..Style::default() });
        let expected = r#"[{"ifindex":1,"ifname":"rxe0","state":"ACTIVE","pid":7}]"#;
        assert_eq!(json.trim_end(), expected);
        for (filters, matches) in [
            (vec![], true),
            (vec![("state", "active")], true),
            (vec![("pid", "5,7"), ("state", "DOWN")], false),
            (vec![("lqpn", "7")], false),
        ] {
            assert_eq!(objects[0].matches(&filters), matches, "{filters:?}");
        }
    }
}
