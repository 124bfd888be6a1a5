//! What is allowed in a configuration and yet deserves a word: limits that others make void, and
//! doing without checksums.

use super::kind::{Kind, Scope};
use super::limits::amount;
use super::{Config, Limits, Network, Span, Values};

/// What an administrator should be told, in sentences.
pub fn warnings(config: &Config) -> Vec<String> {
    let limits = &config.limits;
    let default = Limits::default();
    let named = |scope: Scope| (scope.section().to_owned(), limits.of(scope).clone());
    let (device, user, session) = (named(Scope::Device), named(Scope::User), named(Scope::Session));
    let mut all = Vec::new();
    if !config.mpa.crc {
        all.push(
            "mpa.crc = false is for connections that something else protects as well as CRC32C \
             from end to end, such as IPsec (RFC 5044 section 4.4)"
                .to_owned(),
        );
    }
    if let Some(most) = config.tcp.user_timeout.filter(|most| *most <= config.mpa.rnr_timeout) {
        all.push(format!(
            "mpa.rnr_timeout = {} is not below tcp.user_timeout = {}: a peer with the same \
             timeout gives up while a message is held",
            Span(config.mpa.rnr_timeout),
            Span(most)
        ));
    }
    // A default that a lowered limit makes void is no contradiction: nobody has written it.
    all.extend(above(&session, &user, &default.session));
    all.extend(above(&user, &device, &default.user));
    for (kind, rules) in [("user", &config.users), ("group", &config.groups)] {
        for rule in rules {
            let name = format!("{kind}.{}", rule.who);
            let user = (format!("{name}.user"), limits.user.with(&rule.user));
            let session = (format!("{name}.session"), limits.session.with(&rule.session));
            all.extend(above(&session, &user, &limits.session));
            all.extend(above(&user, &device, &limits.user));
        }
    }
    for pd in &config.pds {
        for (kind, inner) in [(Kind::Mrs, pd.mrs), (Kind::Qps, pd.qps)] {
            let outer = limits.device.of(kind);
            if let Some(inner) = inner.map(u64::from).filter(|inner| *inner > outer) {
                all.push(void(kind, (&format!("pd.{}", pd.name), inner), ("limits", outer)));
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

/// A prefix of keys, and values.
type Named = (String, Values);

/// Values that were set and are above what encloses them.
fn above((name, inner): &Named, (outer_name, outer): &Named, unset: &Values) -> Vec<String> {
    let set = inner.each().filter(|(kind, value)| *value != unset.of(*kind));
    set.filter(|(kind, value)| *value > outer.of(*kind))
        .map(|(kind, value)| void(kind, (name, value), (outer_name, outer.of(kind))))
        .collect()
}

/// The limit of this kind that is void, and the one that is reached before.
fn void(kind: Kind, (inner, value): (&str, u64), (outer, first): (&str, u64)) -> String {
    let (key, value, first) = (kind.key(), amount(kind, value), amount(kind, first));
    format!("{inner}.{key} = {value} is above {outer}.{key} = {first}, which is reached first")
}
