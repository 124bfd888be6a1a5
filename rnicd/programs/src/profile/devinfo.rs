//! Makes a profile from the output of `ibv_devinfo -v`.
//!
//! The lines of the output have the form "name: value", below a line with the name of the device,
//! and below one for each port. Lines of capabilities have no colon, or no key of a profile.

use std::fmt::Write;

use rnicd::config::Profile;

/// Returns the profile as TOML. `file` names the input in errors.
///
/// # Errors
///
/// The line that is wrong, or the line that is missing.
pub(super) fn profile(file: &str, text: &str) -> Result<String, String> {
    let mut device = None;
    let mut ports = 0;
    let mut keys: Vec<(&str, String)> = Vec::new();
    let mut ignored: Vec<&str> = Vec::new();
    let mut gids: Vec<&str> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let name = name.trim();
        let value = value.trim();
        let wrong = |why: String| format!("{file}:{}: {name}: {why}", number + 1);
        match name {
            "hca_id" if device.is_some() => {
                return Err(wrong("a second device; run ibv_devinfo -v -d NAME".to_owned()));
            }
            "hca_id" => device = Some(value),
            "port" => ports += 1,
            // Other ports have the same values, except for their state.
            _ if ports > 1 => {}
            "transport" => keys.push(("transport", transport(value).map_err(wrong)?)),
            _ if name.starts_with("GID[") => gids.push(value),
            _ => match FIELDS.iter().find(|(field, _)| *field == name) {
                Some((key, form)) => {
                    let value = toml_value(*form, value).map_err(wrong)?;
                    let line = format!("{key} = {value}\n");
                    // Checks the range.
                    Profile::parse(key, &line).map_err(|error| wrong(error.to_string()))?;
                    keys.push((key, value));
                }
                None if !value.is_empty() && !ignored.contains(&name) => ignored.push(name),
                None => {}
            },
        }
    }
    let device = device.ok_or_else(|| {
        format!("{file}: no line begins with \"hca_id:\"; this is not the output of ibv_devinfo")
    })?;
    for needed in ["max_qp", "max_mtu"] {
        if !keys.iter().any(|(key, _)| *key == needed) {
            return Err(format!("{file}: no line \"{needed}:\"; use the output of ibv_devinfo -v"));
        }
    }
    let mut out = format!("# From the output of ibv_devinfo -v for {device}.\n");
    if keys.contains(&("transport", "\"roce\"".to_owned())) {
        let _ = writeln!(out, "device = {device:?}");
        keys.push(("gid_layout", format!("{:?}", gid_layout(&gids))));
    }
    for (key, value) in keys {
        // Writes to a String do not fail.
        let _ = writeln!(out, "{key} = {value}");
    }
    out.push_str("# No keys of a profile:\n");
    for name in ignored {
        let _ = writeln!(out, "#   {name}");
    }
    Profile::parse(file, &out).map_err(|error| error.to_string())?;
    Ok(out)
}

/// Form of a value in the output.
#[derive(Clone, Copy)]
enum Form {
    /// A number.
    Number,
    /// A number, followed by the value of the enumeration in parentheses.
    First,
    /// A name, followed by the value of the enumeration in parentheses.
    Enum,
    /// A text.
    Text,
    /// `atomic_cap`.
    Atomics,
}

/// The lines that are keys of a profile.
const FIELDS: &[(&str, Form)] = &[
    ("fw_ver", Form::Text),
    ("vendor_id", Form::Number),
    ("vendor_part_id", Form::Number),
    ("hw_ver", Form::Number),
    ("max_mr_size", Form::Number),
    ("page_size_cap", Form::Number),
    ("device_cap_flags", Form::Number),
    ("atomic_cap", Form::Atomics),
    ("max_qp", Form::Number),
    ("max_qp_wr", Form::Number),
    ("max_sge", Form::Number),
    ("max_sge_rd", Form::Number),
    ("max_cq", Form::Number),
    ("max_cqe", Form::Number),
    ("max_mr", Form::Number),
    ("max_pd", Form::Number),
    ("max_mw", Form::Number),
    ("max_ah", Form::Number),
    ("max_srq", Form::Number),
    ("max_srq_wr", Form::Number),
    ("max_srq_sge", Form::Number),
    ("max_qp_rd_atom", Form::Number),
    ("max_qp_init_rd_atom", Form::Number),
    ("max_res_rd_atom", Form::Number),
    ("local_ca_ack_delay", Form::Number),
    ("max_mtu", Form::First),
    ("active_mtu", Form::First),
    ("max_msg_sz", Form::Number),
    ("gid_tbl_len", Form::Number),
    ("active_width", Form::Enum),
    ("active_speed", Form::Enum),
];

/// Returns a value as TOML.
fn toml_value(form: Form, value: &str) -> Result<String, String> {
    let in_parentheses = value.rsplit_once('(').and_then(|(_, end)| end.strip_suffix(')'));
    let text = match form {
        Form::Text => return Ok(format!("{value:?}")),
        Form::Number => Some(value),
        Form::First => value.split(' ').next(),
        Form::Enum | Form::Atomics => in_parentheses,
    };
    let wrong = || format!("{value:?} is not a number");
    let text = text.ok_or_else(wrong)?;
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    let number = number.map_err(|_| wrong())?;
    Ok(match form {
        Form::Atomics => format!("{:?}", if number == 0 { "none" } else { "hca" }),
        // As in the output. TOML has only signed numbers, so the largest are texts.
        _ if text.starts_with("0x") && i64::try_from(number).is_err() => format!("{text:?}"),
        _ if text.starts_with("0x") => text.to_owned(),
        _ => number.to_string(),
    })
}

fn transport(value: &str) -> Result<String, String> {
    match value {
        _ if value.starts_with("InfiniBand") => Ok("\"roce\"".to_owned()),
        _ if value.starts_with("iWARP") => Ok("\"iwarp\"".to_owned()),
        _ => Err(format!("{value:?} is neither InfiniBand nor iWARP")),
    }
}

fn gid_layout(gids: &[&str]) -> &'static str {
    if gids.iter().any(|gid| gid.ends_with("RoCE v1")) {
        "kernel-v1"
    } else if gids.first().is_none_or(|gid| gid.starts_with("fe80:")) {
        "kernel"
    } else {
        "addresses"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An adapter with the values of some manual pages and outputs.
    const OUTPUT: &str = "hca_id:\tmlx5_0\n\ttransport:\t\t\tInfiniBand (0)\n\
        \tfw_ver:\t\t\t\t16.35.2000\n\tnode_guid:\t\t\t0200:5e00:5301:0001\n\
        \tvendor_id:\t\t\t0x02c9\n\tvendor_part_id:\t\t\t4119\n\thw_ver:\t\t\t\t0x0\n\
        \tmax_mr_size:\t\t\t0xffffffffffffffff\n\tpage_size_cap:\t\t\t0xfffffffffffff000\n\
        \tmax_qp:\t\t\t\t262144\n\tdevice_cap_flags:\t\t0xed721c36\n\t\t\t\t\tXRC\n\
        \t\t\t\t\tUnknown flags: 0xC8400000\n\tatomic_cap:\t\t\tATOMIC_HCA (1)\n\
        \tmax_raw_ethy_qp:\t\t0\n\tgeneral_odp_caps:\n\t\tport:\t1\n\
        \t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tmax_mtu:\t\t4096 (5)\n\
        \t\t\tactive_mtu:\t\t1024 (3)\n\t\t\tactive_width:\t\t4X (2)\n\
        \t\t\tactive_speed:\t\t25.0 Gbps (32)\n\
        \t\t\tGID[  0]:\t\tfe80:0000:0000:0000:0000:5eff:fe00:5301, RoCE v1\n\
        \t\t\tGID[  1]:\t\tfe80::5eff:fe00:5301, RoCE v2\n\
        \t\tport:\t2\n\t\t\tactive_mtu:\t\t256 (1)\n";

    #[test]
    fn devinfo_becomes_a_profile() {
        let text = profile("f", OUTPUT).unwrap_or_else(|e| panic!("{e}"));
        for line in [
            "device = \"mlx5_0\"",
            "gid_layout = \"kernel-v1\"",
            "transport = \"roce\"",
            "fw_ver = \"16.35.2000\"",
            "vendor_id = 0x02c9",
            "max_mr_size = \"0xffffffffffffffff\"",
            "max_qp = 262144",
            "atomic_cap = \"hca\"",
            "active_mtu = 1024",
            "active_width = 2",
            "active_speed = 32",
            "#   node_guid",
            "#   max_raw_ethy_qp",
        ] {
            assert!(text.lines().any(|own| own == line), "{line}: {text}");
        }
        assert_eq!(text.matches("active_mtu").count(), 1, "of the first port: {text}");
    }

    #[test]
    fn wrong_devinfo_is_refused_with_its_line() {
        let with = |from: &str, to: &str| profile("f", &OUTPUT.replace(from, to));
        for (from, to, why) in [
            ("262144", "many", "f:10: max_qp: \"many\" is not a number"),
            ("262144", "-1", "f:10: max_qp: \"-1\" is not a number"),
            ("4096 (5)", "1500 (5)", "max_mtu: max_mtu:1:11: max_mtu = 1500: must be 256, 512"),
            ("4X (2)", "4X", "active_width: \"4X\" is not a number"),
            ("InfiniBand (0)", "unspecified (4)", "is neither InfiniBand nor iWARP"),
            ("hca_id:", "id:", "no line begins with \"hca_id:\""),
            ("max_qp:", "qp:", "no line \"max_qp:\"; use the output of ibv_devinfo -v"),
            ("\t\tport:\t2", "hca_id:\tx", "a second device; run ibv_devinfo -v -d NAME"),
        ] {
            let said = with(from, to).err().unwrap_or_default();
            assert!(said.starts_with('f') && said.contains(why), "{from}: {said}");
        }
        assert!(profile("f", "").is_err());
    }
}
