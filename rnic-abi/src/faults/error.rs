//! Errors of rules.

/// Error in the text of a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultError {
    /// A word is not of the form `KEY=VALUE`.
    #[error("{0:?} is not of the form KEY=VALUE")]
    NoValue(String),
    /// A word contains a character that a rule cannot contain.
    #[error("{0:?} contains a quotation mark or a control character")]
    Special(String),
    /// A quoted value has no closing quotation mark.
    #[error("{0:?} has no closing quotation mark")]
    Unquoted(String),
    /// A key occurs twice.
    #[error("{0} is given twice")]
    Twice(String),
    /// There is no action.
    #[error("do is missing; the actions are {0}")]
    NoAction(String),
    /// The action needs a key.
    #[error("do={action} needs {key}")]
    Missing {
        /// The action.
        action: &'static str,
        /// The key.
        key: &'static str,
    },
    /// The key has no effect in the rule.
    #[error("{key} has no effect with {rule}{why}; its keys are {keys}")]
    Unknown {
        /// The key.
        key: String,
        /// The action and the verb of the rule.
        rule: String,
        /// The reason, if the key has an effect in other rules.
        why: String,
        /// The keys with an effect.
        keys: String,
    },
    /// A value is not valid.
    #[error("{key}={value}: {why}")]
    Value {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// Reason, with the valid values.
        why: String,
    },
    /// The text is too long.
    #[error("the rule has {0} bytes; the maximum is {max}", max = super::MAX_RULE_LEN)]
    TooLong(usize),
}
