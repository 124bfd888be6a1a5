//! What is allowed in a configuration and yet deserves a word: limits that others make void, and
//! doing without checksums.

use super::explain::amount;
use super::{Config, Limits, Network, Span};

/// What an administrator should be told, in sentences.
pub fn warnings(config: &Config) -> Vec<String> {
    let limits = &config.limits;
    let default = Limits::default();
    let device = ("limits".to_owned(), limits.device.each());
    let user = ("limits.user".to_owned(), limits.user.totals.each());
    let session = ("limits.session".to_owned(), limits.session.each());
    let mut all = Vec::new();
    if !config.mpa.crc {
        all.push(
            "mpa.crc = false is for connections that something else protects as well as CRC32C \
             from end to end, such as IPsec (RFC 5044 section 4.4)"
                .to_owned(),
        );
    }
    if let Some(most) = config.tcp.user_timeout.filter(|most| *most <= config.mpa.hold_deadline) {
        all.push(format!(
            "mpa.hold_deadline = {} is not below tcp.user_timeout = {}: a peer with the same \
             timeout gives up while a message is held",
            Span(config.mpa.hold_deadline),
            Span(most)
        ));
    }
    // A default that a lowered limit makes void is no contradiction: nobody has written it.
    all.extend(above(&session, &user, &default.session.each()));
    all.extend(above(&user, &device, &default.user.totals.each()));
    for (key, inner, outer, unset) in [
        ("sessions", limits.user.sessions, limits.sessions, default.user.sessions),
        ("half_open", limits.user.half_open, limits.half_open, default.user.half_open),
        ("movers", limits.user.movers, limits.movers, default.user.movers),
        ("closing", limits.user.closing, limits.closing, default.user.closing),
    ] {
        if inner > outer && inner != unset {
            all.push(void(&format!("limits.user.{key}"), inner, &format!("limits.{key}"), outer));
        }
    }
    for (kind, rules) in [("user", &config.users), ("group", &config.groups)] {
        for rule in rules {
            let name = format!("{kind}.{}", rule.who);
            let of_user = limits.user.with(&rule.user);
            let of_session = limits.session.with(&rule.session.totals);
            let user = (format!("{name}.user"), of_user.totals.each());
            let session = (format!("{name}.session"), of_session.each());
            all.extend(above(&session, &user, &limits.session.each()));
            all.extend(above(&user, &device, &limits.user.totals.each()));
            if of_user.sessions > limits.sessions && rule.user.sessions.is_some() {
                let key = format!("{name}.user.sessions");
                all.push(void(&key, of_user.sessions, "limits.sessions", limits.sessions));
            }
        }
    }
    for pd in &config.pds {
        for (key, inner, outer) in
            [("mrs", pd.mrs, limits.device.mrs), ("qps", pd.qps, limits.device.qps)]
        {
            if let Some(inner) = inner.filter(|inner| *inner > outer) {
                let (inner_key, outer_key) =
                    (format!("pd.{}.{key}", pd.name), format!("limits.{key}"));
                all.push(void(&inner_key, inner, &outer_key, outer));
            }
        }
    }
    let addresses = &config.device.addresses;
    for rule in config.listen.iter().filter(|_| !addresses.is_empty()) {
        if rule.network != Network::Any && !addresses.iter().any(|a| rule.network.contains(*a)) {
            all.push(format!(
                "[[listen]] {rule}: none of these addresses is among device.addresses"
            ));
        }
    }
    all
}

/// A prefix of keys, and values by key.
type Named = (String, [(&'static str, u64); 12]);

/// Values that were set and are above what encloses them.
fn above(inner: &Named, outer: &Named, unset: &[(&'static str, u64); 12]) -> Vec<String> {
    let each = inner.1.iter().zip(&outer.1).zip(unset);
    each.filter(|((inner, outer), unset)| inner.1 > outer.1 && inner.1 != unset.1)
        .map(|(((key, inner_value), (_, outer_value)), _)| {
            let inner_key = format!("{}.{key}", inner.0);
            let outer_key = format!("{}.{key}", outer.0);
            void(&inner_key, amount(key, *inner_value), &outer_key, amount(key, *outer_value))
        })
        .collect()
}

fn void(
    inner_key: &str,
    inner: impl std::fmt::Display,
    outer_key: &str,
    outer: impl std::fmt::Display,
) -> String {
    format!("{inner_key} = {inner} is above {outer_key} = {outer}, which is reached first")
}
