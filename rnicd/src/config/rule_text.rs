//! Rules as text: one sentence for each change.

use super::limits::amount;
use super::{AddressRule, Config, NamedPd, Override, Values};

/// Returns the sentences of all rules, each with a key that identifies the rule.
pub(super) fn rule_text(config: &Config) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for (kind, rules) in [("user", &config.users), ("group", &config.groups)] {
        for rule in rules {
            let key = format!("{kind}.{}", rule.who);
            all.extend(of_override(config, kind, rule).into_iter().map(|s| (key.clone(), s)));
        }
    }
    for pd in &config.pds {
        all.push((format!("pd.{}", pd.name), of_pd(pd)));
    }
    for (kind, verb, rules) in
        [("listen", "listen on", &config.listen), ("connect", "connect to", &config.connect)]
    {
        for (n, rule) in rules.iter().enumerate() {
            let AddressRule { who, .. } = rule;
            all.push((format!("{kind}.{n}"), format!("{} may {verb} {rule}.", capital(who))));
        }
        if !rules.is_empty() {
            all.push((format!("{kind}.else"), format!("No other user may {verb} any address.")));
        }
    }
    all
}

fn of_override(config: &Config, kind: &str, rule: &Override) -> Vec<String> {
    let limits = &config.limits;
    let (one, each) = match kind {
        "user" => (format!("user {}", rule.who), format!("User {}", rule.who)),
        _ => (format!("group {}", rule.who), format!("Each member of group {}", rule.who)),
    };
    let mut lines = Vec::new();
    let of_session = differences(&limits.session, &rule.session);
    let of_user = differences(&limits.user, &rule.user);
    if !of_session.is_empty() {
        lines.push(format!("Sessions of {one} may have {}.", of_session.join(", ")));
    }
    if !of_user.is_empty() {
        lines.push(format!("{each} may have {} in all sessions together.", of_user.join(", ")));
    }
    match rule.trusted {
        Some(true) => lines.push(format!(
            "{each} is trusted: the daemon itself copies from and to attached memory."
        )),
        Some(false) => lines.push(format!("{each} is not trusted.")),
        None => {}
    }
    match rule.sockets {
        Some(true) => lines.push(format!("{each} may pass its own TCP sockets.")),
        Some(false) => lines.push(format!("{each} may not pass TCP sockets.")),
        None => {}
    }
    let where_from = "from other network namespaces";
    let where_to = "the daemon's loopback and link-local addresses";
    match rule.host_loopback {
        Some(true) => lines.push(format!("{each} may use {where_to} {where_from}.")),
        Some(false) => lines.push(format!("{each} may not use {where_to} {where_from}.")),
        None => {}
    }
    if lines.is_empty() {
        lines.push(format!("{each} has the default limits and rights."));
    }
    lines
}

/// Returns the values that a rule changes.
fn differences(without: &Values, rule: &Values) -> Vec<String> {
    let changed = rule.each().map(|(kind, is)| (kind, without.of(kind), is));
    changed
        .filter(|(_, was, is)| was != is)
        .map(|(kind, was, is)| {
            let was = amount(kind, was);
            let is = amount(kind, is);
            format!("{} = {is} (instead of {was})", kind.key())
        })
        .collect()
}

fn of_pd(pd: &NamedPd) -> String {
    let limits: Vec<String> =
        [("sessions", pd.max_sessions), ("regions", pd.mrs), ("queue pairs", pd.qps)]
            .into_iter()
            .filter_map(|(what, limit)| Some(format!("{} {what}", limit?)))
            .collect();
    let within = if limits.is_empty() {
        "within the limits of their sessions".to_owned()
    } else {
        format!("with at most {}", limits.join(", "))
    };
    format!("{} may share the protection domain {:?}, {within}.", capital(&pd.who), pd.name)
}

/// Formats subjects for the start of a sentence.
fn capital(who: &super::Subjects) -> String {
    let text = who.to_string();
    match text.as_str() {
        "every user" => "Every user".to_owned(),
        "no user" => "No user".to_owned(),
        _ => text,
    }
}
