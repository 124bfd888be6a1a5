//! The command line.

use std::path::PathBuf;

use clap::Parser;

/// Give pods the RDMA devices of rnicd, as a device plugin of Kubernetes.
///
/// The plugin registers a resource with the kubelet of its node. A container that requests it gets
/// the daemon's socket and device files (/run/rnicd), the libraries (/usr/lib/rnicd), and an
/// environment in which programs find them. Paths are those of the host; a container of the plugin
/// must have them at the same places.
///
/// Exit status: 0 after SIGTERM or SIGINT; 1 failure; 2 wrong usage.
#[derive(Clone, Debug, Parser)]
#[command(name = "rnic-device-plugin", version)]
pub struct Options {
    /// Resource that pods request.
    #[arg(long, value_name = "DOMAIN/NAME", default_value = RESOURCE, value_parser = resource)]
    pub resource: String,
    /// Containers of this node that can have the resource at the same time.
    #[arg(long, value_name = "N", default_value_t = 63, value_parser = clap::value_parser!(u16).range(1..))]
    pub shares: u16,
    /// Devices that the containers see ("rnicd1,rnicd0") [default: the daemon's RoCE devices].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub devices: Vec<String>,
    /// Socket of the daemon. Containers get its directory.
    #[arg(long, value_name = "PATH", default_value = "/run/rnicd/rnicd.sock", value_parser = absolute)]
    pub socket: PathBuf,
    /// Directory with libibverbs.so.1, librdmacm.so.1 and librnic_preload.so.
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/rnicd/lib", value_parser = absolute)]
    pub lib_dir: PathBuf,
    /// The kubelet's directory of device plugins.
    #[arg(long, value_name = "FOLDER", default_value = "/var/lib/kubelet/device-plugins", value_parser = absolute)]
    pub kubelet: PathBuf,
}

/// The resource of k8s-rdma-shared-dev-plugin's examples, so that their pods run unmodified.
const RESOURCE: &str = "rdma/hca_shared_devices_a";

/// Accepts a domain and a name, as the kubelet does for extended resources.
fn resource(text: &str) -> Result<String, String> {
    let is_label = |text: &str, more: &[char]| {
        let is_end = |c: char| c.is_ascii_alphanumeric();
        text.starts_with(is_end)
            && text.ends_with(is_end)
            && text.chars().all(|c| is_end(c) || more.contains(&c))
    };
    match text.split_once('/') {
        Some((domain, name))
            if is_label(domain, &['-', '.'])
                && is_label(name, &['-', '_', '.'])
                && domain.len() <= 253
                && name.len() <= 63
                && !domain.ends_with("kubernetes.io") =>
        {
            Ok(text.to_owned())
        }
        _ => Err(format!(
            "not a domain and a name of at most 63 letters, digits, '-', '_' and '.', as in \
             \"{RESOURCE}\"; kubernetes.io is reserved"
        )),
    }
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("must be an absolute path".to_owned()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Options::command().debug_assert();
        let parsed = Options::try_parse_from(["plugin", "--devices", "rnicd1,rnicd0"]).unwrap();
        assert_eq!(parsed.devices, ["rnicd1", "rnicd0"]);
        assert_eq!((&*parsed.resource, parsed.shares), (RESOURCE, 63));
    }

    #[test]
    fn invalid_values_are_refused_by_option() {
        for (option, value) in [
            ("--resource", "hca"),
            ("--resource", "rdma/a/b"),
            ("--resource", "rdma/-a"),
            ("--resource", "node.kubernetes.io/a"),
            ("--shares", "0"),
            ("--shares", "many"),
            ("--socket", "rnicd.sock"),
        ] {
            let error = Options::try_parse_from(["plugin", option, value]).unwrap_err();
            assert!(error.to_string().contains(option), "{option} {value}: {error}");
        }
    }

    /// The manifest sets only options that exist.
    #[test]
    fn manifest_has_valid_arguments() {
        let manifest = include_str!("../../rnicd.yaml");
        let args = manifest.lines().filter_map(|line| line.trim().strip_prefix("args: "));
        let mut args = args.filter(|line| line.contains("--resource"));
        let args = args.next().expect("the arguments of the plugin, in one line");
        let args = args.split('"').skip(1).step_by(2);
        let options = Options::try_parse_from(["plugin"].into_iter().chain(args)).unwrap();
        let example = include_str!("../../example.yaml");
        assert!(example.contains(&format!("{}: 1", options.resource)), "{options:?}");
    }
}
