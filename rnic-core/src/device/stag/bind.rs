//! Binds windows: checks a bind request and creates the window's entry.

use std::sync::Arc;

use super::StagTable;
use super::change::StagChange;
use super::entry::{Principal, StagEntry, StagKind};
use crate::device::allocator::index;
use crate::device::window::{BindFault, BindRequest, Binding, Window};
use rnic_abi::types::{Access, Scope, WindowKind};

impl StagTable {
    /// Binds a window. Returns the change that every worker must apply first, or `None` for a type
    /// 2 window, which only `principal` uses.
    pub fn bind(
        &mut self,
        principal: Principal,
        request: &BindRequest,
    ) -> Result<Option<StagChange>, BindFault> {
        let window = self.windows.find(request.window).ok_or(BindFault::NoWindow)?.clone();
        if window.session() != principal.session || window.pd() != principal.pd {
            return Err(BindFault::NoWindow);
        }
        let new = request.new;
        if index(new) != index(request.window) || new.0 == 0 || new.0 == u32::MAX {
            return Err(BindFault::NewKey);
        }
        match window.kind() {
            WindowKind::Type1 => {
                if new == request.window {
                    return Err(BindFault::NewKey);
                }
                let install = match request.length {
                    0 => None,
                    _ => Some(self.entry_for(principal, &window, request)?.0),
                };
                let revoke = window.begin(request.window)?;
                let copier = revoke.and_then(|stag| self.copier_of(stag));
                Ok(Some(StagChange { revoke, copier, install, window: Some((window, new)) }))
            }
            WindowKind::Type2 => {
                let (entry, binding) = self.entry_for(principal, &window, request)?;
                window.bind(request.window, new, binding)?;
                self.install(entry);
                Ok(None)
            }
        }
    }

    /// Returns the entry of the window after the requested bind, and its binding.
    fn entry_for(
        &self,
        principal: Principal,
        window: &Window,
        r: &BindRequest,
    ) -> Result<(StagEntry, Arc<Binding>), BindFault> {
        let region = self.entries.get(&r.lkey).ok_or(BindFault::NoRegion)?;
        let StagKind::Region(count) = &region.kind else { return Err(BindFault::NoRegion) };
        if region.session != principal.session
            || region.pd != principal.pd
            || !region.serves(principal.qp)
        {
            return Err(BindFault::NoRegion);
        }
        let scope = match (window.kind(), region.scope) {
            (WindowKind::Type1, Scope::Qp(_)) => return Err(BindFault::RegionOfOneQp),
            (WindowKind::Type1, Scope::Pd) => Scope::Pd,
            (WindowKind::Type2, _) => Scope::Qp(principal.qp),
        };
        if !region.access.contains(Access::MW_BIND) {
            return Err(BindFault::NotBindable);
        }
        let access = Access::from_bits(r.access).ok_or(BindFault::Rights)?;
        if !WINDOW_RIGHTS.contains(access) {
            return Err(BindFault::Rights);
        }
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if writes && !region.access.contains(Access::LOCAL_WRITE) {
            return Err(BindFault::NoLocalWrite);
        }
        if r.length == 0 {
            return Err(BindFault::Bounds);
        }
        let from = region.offset_of(r.address, r.length).ok_or(BindFault::Bounds)?;
        let binding = Binding::new(window.id(), region.mr, count)?;
        // The address plus the length is at most the end of the region, which is below 2^64.
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { r.address };
        let entry = StagEntry {
            stag: r.new,
            scope,
            access,
            iova,
            length: r.length,
            memory: region.memory.at(from as u64),
            kind: StagKind::Window(binding.clone()),
            ..region.clone()
        };
        Ok((entry, binding))
    }
}

/// Rights that a window may have.
pub(super) const WINDOW_RIGHTS: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::ZERO_BASED);
