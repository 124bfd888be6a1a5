//! SIGHUP: the configuration file is read again. Everything or nothing: a file that is wrong in one
//! place changes nothing.

use std::path::PathBuf;

use crate::config::Config;
use crate::log::Level;
use crate::resource::Manager;

/// Where the configuration came from, and what changes the level of the log.
pub(super) struct ConfigSource {
    pub(super) file: PathBuf,
    /// None if `RUST_LOG` says what is logged.
    pub(super) level: Option<Level>,
}

/// Reads the file again and has the manager take it over. The error is what whoever asked is told.
pub(super) fn reload(source: Option<&ConfigSource>, manager: &mut Manager) -> Result<(), String> {
    let Some(ConfigSource { file, level }) = source else {
        tracing::warn!("SIGHUP: there is no configuration file to read again");
        return Err("there is no configuration file to read again".to_owned());
    };
    let config = Config::load(file).map_err(|error| {
        tracing::error!("configuration not reloaded, the old one stays: {error}");
        format!("configuration not reloaded, the old one stays: {error}")
    })?;
    let log = config.log.clone();
    let reloaded = manager.reload(config);
    for change in &reloaded.changed {
        tracing::info!("reloaded: {change}");
    }
    for change in &reloaded.kept {
        tracing::warn!("not changed before the next start: {change}");
    }
    for warning in crate::config::warnings(manager.config()) {
        tracing::warn!("configuration: {warning}");
    }
    let (changed, kept) = (reloaded.changed.len(), reloaded.kept.len());
    tracing::info!(file = %file.display(), changed, kept, "configuration reloaded");
    // Last, so that these lines are logged as before.
    if reloaded.changed.iter().any(|change| change.key == "log.level")
        && !level.as_ref().is_some_and(|level| level.set(&log))
    {
        tracing::warn!("log.level stays: RUST_LOG overrides it");
    }
    Ok(())
}
