//! Type of all keys in the file format.

use toml::Spanned;

/// A value with its position, or `None` if the file does not set it.
pub type Field<T> = Option<Spanned<T>>;
