//! What every section of the file is made of.

use toml::Spanned;

/// A value with its place, or nothing.
pub type Field<T> = Option<Spanned<T>>;
