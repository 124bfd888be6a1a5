//! Warnings about valid configurations: limits that another limit makes ineffective, no CRCs, and
//! timeouts that conflict.

use super::kind::{Kind, Scope};
use super::limits::amount;
use super::{Config, Limits, Network, Span, Values};

/// Returns the warnings as sentences.
pub fn warnings(config: &Config) -> Vec<String> {
    let limits = &config.limits;
    let default = Limits::default();
    let named =
        |scope: Scope| Named { name: scope.section().to_owned(), values: limits.of(scope).clone() };
    let device = named(Scope::Device);
    let user = named(Scope::User);
    let session = named(Scope::Session);
    let mut all = Vec::new();
    if !config.mpa.crc {
        all.push(
            "mpa.crc = false is only for connections that have other end-to-end protection as \
             strong as CRC32C, such as IPsec (RFC 5044 section 4.4)"
                .to_owned(),
        );
    }
    if let Some(most) = config.tcp.user_timeout.filter(|most| *most <= config.mpa.rnr_timeout) {
        all.push(format!(
            "mpa.rnr_timeout = {} is not below tcp.user_timeout = {}: a peer with the same \
             timeout closes the connection while a message waits",
            Span(config.mpa.rnr_timeout),
            Span(most)
        ));
    }
    // Defaults above a lowered limit cause no warning, because the administrator did not write
    // them.
    all.extend(above(&session, &user, &default.session));
    all.extend(above(&user, &device, &default.user));
    for (kind, rules) in [("user", &config.users), ("group", &config.groups)] {
        for rule in rules {
            let name = format!("{kind}.{}", rule.who());
            let user = Named { name: format!("{name}.user"), values: limits.user.with(&rule.user) };
            let session = Named {
                name: format!("{name}.session"),
                values: limits.session.with(&rule.session),
            };
            all.extend(above(&session, &user, &limits.session));
            all.extend(above(&user, &device, &limits.user));
        }
    }
    for pd in &config.pds {
        for (kind, inner) in [(Kind::Mrs, pd.mrs), (Kind::Qps, pd.qps)] {
            let outer = limits.device.of(kind);
            if let Some(inner) = inner.map(u64::from).filter(|inner| *inner > outer) {
                all.push(ineffective(kind, &format!("pd.{}", pd.name), inner, "limits", outer));
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

/// Limits of a section.
struct Named {
    /// Prefix of the keys.
    name: String,
    values: Values,
}

/// Returns warnings for values that were set and are above an enclosing limit.
fn above(inner: &Named, outer: &Named, unset: &Values) -> Vec<String> {
    let set = inner.values.each().filter(|(kind, value)| *value != unset.of(*kind));
    set.filter(|(kind, value)| *value > outer.values.of(*kind))
        .map(|(kind, value)| {
            ineffective(kind, &inner.name, value, &outer.name, outer.values.of(kind))
        })
        .collect()
}

/// Returns the warning about an ineffective limit and the limit that is reached first.
fn ineffective(kind: Kind, inner: &str, value: u64, outer: &str, first: u64) -> String {
    let key = kind.key();
    let value = amount(kind, value);
    let first = amount(kind, first);
    format!("{inner}.{key} = {value} is above {outer}.{key} = {first}, which is reached first")
}
